"""`triptych key` and the key file fit together."""

import json
from pathlib import Path

import pytest

from services.gateway.tenancy.tenants import Keyring
from triptych.cli import main


def opens(path: Path, key: str) -> str | None:
    """The tenant whose key it is."""
    identity = Keyring((), path).identify(f"Bearer {key}".encode())
    return None if identity is None else identity.tenant.name


def test_a_made_key_opens_what_its_entry_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "search"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    key, entry = first.split(": ")[1], json.loads(second.split(": ", 1)[1])
    (tmp_path / "keys").write_text(json.dumps({"keys": [entry]}))
    assert opens(tmp_path / "keys", key) == "search"


def test_entries_are_added_to_a_file_and_what_is_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    made: dict[str, str] = {}
    for tenant in ("search", "shop"):
        assert main(["key", tenant, "--file", str(path)]) == 0
        made[tenant] = capsys.readouterr().out.strip()
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"tenants": {"search": {"weight": 2}}}))
    assert json.loads(path.read_text())["tenants"] == {"search": {"weight": 2}}
    assert [opens(path, key) for key in made.values()] == ["search", "shop"]
    assert main(["key", "shop", "--file", str(path)]) == 2
    assert "--id" in capsys.readouterr().err
    assert main(["key", "shop", "--id", "shop-2", "--file", str(path)]) == 0
    assert len(json.loads(path.read_text())["keys"]) == 3


@pytest.mark.parametrize("text", ["", "[]", '{"keys": {}}', "{"])
def test_another_file_is_left_alone(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    assert main(["key", "shop", "--file", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert path.read_text() == text


def test_a_file_stays_readable_for_whom_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    path.chmod(0o640)
    assert main(["key", "shop", "--file", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shop", "--file", "{}/none/keys.json"], "No such file or directory"),
        (["my shop"], "'my shop' is not a valid name: 1 to 64 letters"),
        (["x" * 60], "is not a valid name: 1 to 64 letters"),  # its id, with the date
        (
            ["shop", "--id", "a/b", "--file", "{}/keys.json"],
            "'a/b' is not a valid name: 1 to 64 letters",
        ),
    ],
)
def test_what_no_gateway_reads_is_a_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", *(word.format(tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and said in err
    assert not (tmp_path / "keys.json").exists()
