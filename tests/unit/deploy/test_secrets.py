"""Secrets: each key that a manifest reads is made by `secrets.sh`, or its making is documented."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import test_trials as trials
from tests.unit.deploy.combinations import COMBINATIONS, K8S, combine
from tests.unit.deploy.kustomize import Resource, render

SCRIPT = K8S / "secrets.sh"
README = (K8S / "README.md").read_text(encoding="utf-8")


def made(*names: str) -> dict[str, dict[str, str]]:
    """The script's secrets, by name."""
    text = subprocess.run([SCRIPT, *names], capture_output=True, text=True, check=True).stdout
    return {
        document["metadata"]["name"]: document["stringData"]
        for document in yaml.safe_load_all(text)
        if document
    }


def read_by(resources: list[Resource]) -> Iterator[tuple[str, str | None]]:
    """Secrets and keys that pods mount or have in their environment; None: every key."""

    def walk(node: Any) -> Iterator[tuple[str, str | None]]:
        if isinstance(node, list):
            for item in node:
                yield from walk(item)
        if not isinstance(node, dict):
            return
        if "secretKeyRef" in node:
            yield node["secretKeyRef"]["name"], node["secretKeyRef"]["key"]
        if "secretName" in node:
            for item in node.get("items", [{"key": None}]):
                yield node["secretName"], item["key"]
        for value in node.values():
            yield from walk(value)

    for resource in resources:
        if resource["kind"] in ("Deployment", "Job"):
            yield from walk(resource["spec"]["template"]["spec"])


def test_every_key_that_is_read_is_made(tmp_path: Path) -> None:
    found: set[tuple[str, str | None]] = set()
    for name, names in COMBINATIONS.items():
        found |= set(read_by(render(combine(*names, directory=tmp_path / name))))
    by_script = made("redis", "limits", "token")
    keys = {(name, key) for name, secret in by_script.items() for key in secret}
    read = {pair for pair in found if pair[0] in by_script}
    assert {name for name, _ in read} == by_script.keys()
    assert {pair for pair in read if pair[1] is not None} <= keys
    for name, key in found - read:
        assert name in README, f"nobody says how to make the secret {name}"
        assert key is None or key in README, f"nobody says what {key} of {name} is"


def test_secrets_are_new_each_time_and_unknown_ones_are_refused() -> None:
    one, two = (made("redis", "limits", "token") for _ in range(2))
    for name in one:
        assert one[name].keys() == two[name].keys()
        assert not set(one[name].values()) & set(two[name].values())
    with pytest.raises(subprocess.CalledProcessError):
        made("postgres")
    with pytest.raises(subprocess.CalledProcessError):
        made()


def test_readme_and_the_trials_of_a_cluster_use_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both apply the same secret, and in the order that the pods need it."""
    calls: list[tuple[tuple[str, ...], str]] = []

    def kubectl(*arguments: str, stdin: str | None = None) -> str:
        calls.append((arguments, stdin or ""))
        return ""

    monkeypatch.setattr(trials, "kubectl", kubectl)
    trials.deploy()
    verbs = [arguments[0] for arguments, _ in calls]
    assert verbs == ["apply", "get", "create", "apply"]
    (secret,) = (d for d in yaml.safe_load_all(calls[2][1]) if d)
    asked = {key for name, key in read_by(render(K8S / "overlays/local"))
             if name == "triptych-redis"}  # fmt: skip
    assert secret["metadata"]["name"] == "triptych-redis"
    assert asked <= secret["stringData"].keys() and len(asked) == 4
    assert "deploy/k8s/secrets.sh redis | kubectl -n triptych create -f -" in README
