"""docker-compose.yml, as far as it can be checked without an engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import watchstep
from tests.conftest import S3
from tests.infra.compose import (
    COMPOSE_FILE,
    command_of,
    health_of,
    interpolated,
    raw_services,
    search_path,
    services,
)
from watchstep.store.store import Store
from watchstep_services.cli.main import load
from watchstep_services.core.settings import PREFIX, Settings

SCHEMA = Path(__file__).with_name("compose_spec") / "compose-spec.json"
OURS = ("api", "worker", "scheduler", "bucket")
ONE_SHOT = "bucket"
each_service = pytest.mark.parametrize("name", sorted(raw_services()))


def test_the_file_follows_the_compose_specification() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8")))


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose IS NOT INSTALLED")
def test_docker_compose_reads_it_as_the_tests_do(tmp_path: Path) -> None:
    (tmp_path / "empty.env").touch()
    done = subprocess.run(
        ["docker-compose", "--env-file", tmp_path / "empty.env", "--file", COMPOSE_FILE, "config"],
        env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)["services"]
    assert read.keys() == services().keys()
    for name, service in services().items():
        assert read[name].get("command") == service.get("command")
        assert read[name]["environment"] == service["environment"]


def test_the_services() -> None:
    assert set(services()) == {*OURS, "postgres", "redis", "s3"}


def test_every_variable_of_watchstep_is_a_setting() -> None:
    setting_names = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    named = set(re.findall(rf"\b{PREFIX}[A-Z_]+", COMPOSE_FILE.read_text(encoding="utf-8")))
    assert named <= setting_names
    for name in OURS:
        environment = services()[name]["environment"]
        values = {
            key.removeprefix(PREFIX).lower(): environment[key] for key in environment if key in setting_names
        }
        settings = Settings(**values)
        assert settings.broker_url
        assert settings.database_url
        assert settings.store


@pytest.mark.parametrize("name", OURS)
def test_programs_and_modules_exist(name: str) -> None:
    program, *arguments = command_of(name)
    assert shutil.which(program, path=search_path()) is not None
    if program == "watchstep":
        taken = {option for parameter in load(arguments[0]).params for option in parameter.opts}
        assert {word for word in arguments if word.startswith("--")} <= taken


@each_service
def test_no_secret_is_fixed(name: str) -> None:
    """A password or key comes from a variable; the value here is its default for development."""

    def values(value: Any) -> list[str]:
        if isinstance(value, dict | list):
            children = value.values() if isinstance(value, dict) else value
            return [text for child in children for text in values(child)]
        return [str(value)]

    for text in values(raw_services()[name]):
        assert "development" not in re.sub(r"\$\{[A-Z0-9_]+:-[^}]+\}", "", text)
    for key, text in raw_services()[name]["environment"].items() if name != ONE_SHOT else ():
        if re.search("PASSWORD|SECRET|ACCESS_KEY|AUTH", key):
            assert re.fullmatch(r"\$\{[A-Z0-9_]+:-[^}]+\}", text)


@each_service
def test_the_container_has_few_privileges(name: str) -> None:
    service = services()[name]
    assert str(service["user"]).partition(":")[0] not in {"", "0", "root"}
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


@each_service
def test_services_restart_and_report_their_health(name: str) -> None:
    service = services()[name]
    assert service["restart"] == ("on-failure:5" if name == ONE_SHOT else "unless-stopped")
    assert ("healthcheck" in service) == (name != ONE_SHOT)
    for needed, how in service.get("depends_on", {}).items():
        expected = "service_completed_successfully" if needed == ONE_SHOT else "service_healthy"
        assert how == {"condition": expected}


@each_service
def test_images_are_pinned(name: str) -> None:
    image = services()[name]["image"]
    assert re.search(r":v?\d+\.\d+(\.\d+)?(-[a-z]+)?$", image)
    if "build" in services()[name]:
        assert image.endswith(f":{watchstep.__version__}")


def test_only_what_people_need_is_reached_from_outside_and_only_from_this_machine() -> None:
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published == {"api": ["127.0.0.1:8642:8642"], "s3": ["127.0.0.1:7070:7070"]}


def test_what_must_last_is_on_a_volume() -> None:
    declared = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))["volumes"]
    mounted = {
        volume.partition(":")[0] for service in services().values() for volume in service.get("volumes", [])
    }
    assert mounted == set(declared) == {"database", "objects"}


@pytest.mark.ci
def test_the_bucket_is_made_once(s3: S3) -> None:
    store = services()[ONE_SHOT]["environment"]["WATCHSTEP_STORE"]
    for _ in range(2):
        environment = {**os.environ, "WATCHSTEP_STORE": store}
        subprocess.run([sys.executable, *command_of(ONE_SHOT)[1:]], env=environment, check=True, timeout=600)
    Store.open(store).check_writable()


@pytest.mark.parametrize("name", [name for name in raw_services() if name != ONE_SHOT])
def test_health_is_checked_by_a_program(name: str) -> None:
    assert health_of(name)[0] in {"python", "sh", "pg_isready", "wget"}


def test_variables_have_defaults() -> None:
    assert interpolated("a ${NAME:-b} $$c") == "a b $c"
    with pytest.raises(ValueError, match="NAME"):
        interpolated("${NAME}")
