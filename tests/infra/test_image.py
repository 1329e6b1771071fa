"""infra/Dockerfile, as far as it can be checked without an engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.infra.compose import ROOT, services

DOCKERFILE = ROOT / "infra" / "Dockerfile"
Stage = list[tuple[str, str]]


def read_stages() -> dict[str, Stage]:
    """The stages by name: instructions and what follows them, each on one line."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found: dict[str, Stage] = {}
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            stage = found.setdefault(rest.rpartition(" AS ")[2], [])
        stage.append((instruction, rest))
    return found


def copied() -> list[tuple[str, str]]:
    """What the image is built from: each source, and where it lands."""
    lines = [rest.split() for instruction, rest in STAGES["build"] if instruction == "COPY"]
    return [(source, target) for *sources, target in lines for source in sources]


STAGES = read_stages()
BUILT = {name: service for name, service in services().items() if "build" in service}


def test_stages() -> None:
    assert list(STAGES) == ["build", "watchstep", "s3"]
    assert {service["build"]["target"] for service in BUILT.values()} == {"watchstep", "s3"}


@pytest.mark.parametrize("name", STAGES)
def test_base_images_are_pinned(name: str) -> None:
    instruction, image = STAGES[name][0]
    assert instruction == "FROM"
    assert re.search(r":v?\d+\.\d+\.\d+(-[a-z-]+)? AS ", image)


@pytest.mark.parametrize("name", BUILT)
def test_the_user_is_the_one_that_compose_names(name: str) -> None:
    assert ROOT / BUILT[name]["build"]["dockerfile"] == DOCKERFILE
    users = [rest for instruction, rest in STAGES[BUILT[name]["build"]["target"]] if instruction == "USER"]
    assert users == [BUILT[name]["user"]] == ["10001:10001"]


def test_the_working_directory_can_be_written_to() -> None:
    assert ("WORKDIR", "/run/watchstep") in STAGES["watchstep"]
    for service in BUILT.values():
        if service["build"]["target"] == "watchstep":
            assert "/run/watchstep:uid=10001,gid=10001,mode=0700" in service["tmpfs"]


def test_the_objects_volume_belongs_to_the_user() -> None:
    assert ("RUN", "mkdir /data && chown 10001:10001 /data") in STAGES["s3"]
    assert services()["s3"]["volumes"] == ["objects:/data"]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignore
    for source, _ in copied():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore


@pytest.mark.ci
def test_the_wheel_is_built_from_what_is_copied(tmp_path: Path) -> None:
    for source, target in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, tmp_path / target, ignore=lambda *_: {"__pycache__", "node_modules"}
            )
        else:
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / target)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel"],
        cwd=tmp_path, check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").iterdir()
    packed = set(zipfile.ZipFile(wheel).namelist())
    for package in (
        "sdk/watchstep",
        "rules/watchstep_rules",
        "launch/watchstep_launch",
        "services/watchstep_services",
    ):
        top = (ROOT / package).parent
        for module in (ROOT / package).rglob("*.py"):
            assert str(module.relative_to(top)) in packed
    assert "watchstep_services/db/migrations/script.py.mako" in packed
    assert (
        "watchstep_services/page/index.html" in packed
    )  # built before, by `make page`; the image's own build has Node.js


def test_the_image_installs_what_production_and_traces_need_and_no_framework() -> None:
    (install,) = [rest for instruction, rest in STAGES["build"] if "--constraint" in rest]
    assert "--constraint requirements/lock.txt" in install
    named = re.search(r'"\$\{wheel\}\[([a-z,]+)\]"', install)
    assert named is not None
    # The very same is installed and loaded by the checks that need a package index.
    assert named[0] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    needed: dict[str, set[str]] = {}
    extras = named[1].split(",")
    for extra in extras:
        for text in requires("watchstep") or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed.setdefault(requirement.name, set()).update(requirement.extras)
                if requirement.name == "watchstep":
                    extras.extend(requirement.extras - set(extras))
    assert needed.keys() >= {"celery", "uvicorn", "psycopg", "boto3", "obstore", "opentelemetry-sdk"}
    assert needed["celery"] == {"redis"}  # brings what kombu's Redis transport imports, not only the client
    # matplotlib draws the pictures of notifications (decision 172).
    assert not needed.keys() & {"torch", "scikit-learn", "pytest"}
