"""What pods write to: volumes of bounded size and nothing else, in every combination."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.combinations import COMBINATIONS, K8S, combine
from tests.unit.deploy.kustomize import render
from tests.unit.deploy.test_components import pods

ROOT = K8S.parents[1]
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
ENGINES = {"encoder", "decoder", "triptych"}
# Where each image with an engine is built.
DOCKERFILES = {
    "encoder": "services/encoder/Dockerfile", "decoder": "services/decoder/Dockerfile",
    "triptych": "deploy/Dockerfile",
}  # fmt: skip
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


@pytest.fixture(params=[*OVERLAYS, *COMBINATIONS])
def found(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Specs of the pods, by name."""
    names = COMBINATIONS.get(request.param, (request.param,))
    rendered = render(combine(*names, directory=tmp_path / "own"))
    return {name: pod["spec"] for name, pod in pods(rendered).items()}


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in ("initContainers", "containers"):
        yield from pod.get(kind, ())


def size(text: str) -> int:
    return int(text[:-2]) * _UNITS[text[-2:]]


def on_disk(pod: dict[str, Any], container: dict[str, Any]) -> int:
    """The most bytes that a container may have in volumes on the node's disk."""
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    return sum(
        size(volume["emptyDir"]["sizeLimit"])
        for volume in pod["volumes"]
        if volume["name"] in mounted and "emptyDir" in volume
        if "medium" not in volume["emptyDir"]
    )


def test_the_root_is_read_only_and_the_disk_is_bounded(found: dict[str, dict[str, Any]]) -> None:
    for pod in found.values():
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            asked, limits = (container["resources"][k] for k in ("requests", "limits"))
            limit = size(limits["ephemeral-storage"])
            assert 0 < size(asked["ephemeral-storage"]) <= limit
            assert on_disk(pod, container) < limit  # logs count, too
        for volume in pod["volumes"]:
            assert "emptyDir" not in volume or size(volume["emptyDir"]["sizeLimit"])


def test_engines_have_a_home_and_temporary_files_to_write_to(
    found: dict[str, dict[str, Any]],
) -> None:
    """Triton, flashinfer, CUDA and the hub keep their caches in the home, inductor in /tmp."""
    for pod in found.values():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in containers(pod):
            if container["name"] not in ENGINES:
                continue
            mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
            for path in ("/tmp", "/home/triptych", "/dev/shm"):
                assert "emptyDir" in volumes[mounts[path]["name"]]
                assert not mounts[path].get("readOnly")
    assert found.keys() & ENGINES


@pytest.mark.parametrize("service", sorted(ENGINES))
def test_no_cache_is_sent_elsewhere(service: str) -> None:
    """The home is that of the image's user, and no variable moves what is written."""
    dockerfile = (ROOT / DOCKERFILES[service]).read_text()
    final_stage = dockerfile[dockerfile.rindex("\nFROM ") :]
    assert "--uid 10001 --user-group --create-home triptych" in final_stage
    if service == "triptych":  # downloads go to the claim: test_single.py
        final_stage = final_stage.replace("HF_HOME=/models/hub", "")
    moved = r"\b(HOME|TMPDIR|XDG_\w+|HF_\w+|\w*(CACHE|WORKSPACE)_(DIR|BASE|PATH|HOME)\w*)="
    assert not re.search(moved, final_stage)
    for path in (K8S / "overlays").glob("*/kustomization.yaml"):
        text = path.read_text().replace("HF_XET_CHUNK_CACHE_SIZE_BYTES", "")  # a size, not a place
        assert not re.search(moved, text)


def test_what_is_missing_is_noticed(tmp_path: Path) -> None:
    resources = render(combine("gpu", directory=tmp_path / "own"))
    pod = pods(resources)["decoder"]["spec"]
    (container,) = pod["containers"]
    whole = json.dumps(pod)
    test_the_root_is_read_only_and_the_disk_is_bounded({"decoder": pod})
    container["resources"]["limits"]["ephemeral-storage"] = "5Gi"
    with pytest.raises(AssertionError):
        test_the_root_is_read_only_and_the_disk_is_bounded({"decoder": pod})
    pod = json.loads(whole)
    pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = False
    with pytest.raises(AssertionError):
        test_the_root_is_read_only_and_the_disk_is_bounded({"decoder": pod})
