"""deploy/compose: valid by the specification's schema; its parts agree with image and command."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts import compose_rules
from services.common.families import read_spec
from tests.ports import free_port
from tests.unit.deploy.kustomize import LOADER
from triptych.cli import build_parser
from triptych.options import DEMONSTRATION_MODEL, ServeOptions
from triptych.plan import Links, plan_stack

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "deploy" / "compose"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
FILES = ("compose.yaml", "compose.gpu.yaml")


def load(name: str) -> Any:
    return yaml.load((COMPOSE / name).read_text(), LOADER)


def entry_point() -> list[str]:
    (words,) = re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)
    return json.loads(words)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_valid_and_a_mistake_is_not(name: str) -> None:
    schema = json.loads((Path(__file__).parent / "compose_schema.json").read_text())["schema"]
    document = load(name)
    validator = jsonschema.Draft7Validator(schema)
    validator.validate(document)
    document["services"]["triptych"]["comand"] = []
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(document)


def test_serve_takes_the_command_and_the_variables() -> None:
    service = load("compose.yaml")["services"]["triptych"]
    for command in (
        service["command"],
        load("compose.gpu.yaml")["services"]["triptych"]["command"],
    ):
        words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in command]
        build_parser().parse_args([*entry_point()[1:], *words])
    variables = {
        name: "none" if name == "GATEWAY_API_KEYS" else value
        for name, value in service["environment"].items()
    }
    variables["GATEWAY_PORT"] = str(free_port())
    options = ServeOptions(model=DEMONSTRATION_MODEL)
    spec = read_spec(DEMONSTRATION_MODEL)
    plan = plan_stack(options, spec, None, variables, 4, Links(sockets=Path("/tmp/links")))
    assert plan.notes == []
    assert plan.grace_s < float(service["stop_grace_period"].removesuffix("s"))


def test_prometheus_scrapes_what_the_image_serves() -> None:
    port = entry_point()[entry_point().index("--metrics-port") + 1]
    (job,) = load("prometheus.yaml")["scrape_configs"]
    (target,) = job["static_configs"]
    assert target["targets"] == [f"triptych:{port}"]
    rules = (COMPOSE / "rules.yaml").read_text()
    assert rules == compose_rules.document()
    for name, value in target["labels"].items():
        assert f'{name}="{value}"' in rules


def test_files_that_are_mounted_exist_and_ports_are_this_machines_alone() -> None:
    for name, service in load("compose.yaml")["services"].items():
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            if source.startswith("."):
                assert (COMPOSE / source).is_file() and mode == ["ro"], name
            else:
                assert source in load("compose.yaml")["volumes"]
            assert target.startswith("/")
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_grafana_finds_its_dashboard_and_its_prometheus() -> None:
    services = load("compose.yaml")["services"]
    (provider,) = load("grafana/dashboards.yaml")["providers"]
    mounted = [v.split(":")[1] for v in services["grafana"]["volumes"]]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounted and home.startswith(provider["options"]["path"] + "/")
    (source,) = load("grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
