"""``watchstep stores``, ``backends`` and ``projects``, with a running service."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from watchstep.errors import ServiceError, WatchstepError
from watchstep_services.auth import create_token
from watchstep_services.cli.main import app
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "a").mkdir()
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tenants: Path) -> Iterator[EmbeddedService]:
    home = tmp_path_factory.mktemp("home")
    settings = load_settings(home=home, store=str(home / "store"), local_stores=tenants)
    with EmbeddedService(settings) as running:
        yield running


@pytest.fixture(autouse=True)
def _admin(service: EmbeddedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("WATCHSTEP_SERVICE", service.url)
    monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(service.database, "admin"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def said(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: str) -> WatchstepError:
    with pytest.raises(WatchstepError) as told:
        run(*arguments)
    return told.value


def test_the_services_own_store_exists_before_the_first_run(service: EmbeddedService) -> None:
    (line,) = [line for line in said("stores", "list").splitlines() if service.settings.store in line]
    assert "default" in line


def test_from_a_store_to_an_archived_project(tenants: Path) -> None:
    assert "store team-a is registered" in said("stores", "add", "team-a", str(tenants / "a"))
    steps = said("stores", "check", "team-a").splitlines()
    assert [line.split() for line in steps] == [
        [step, "ok"] for step in ("list", "write", "read", "create_once", "delete")
    ]
    assert "backend box is registered" in said("backends", "add", "box", "local")
    assert "box" in said("backends", "list")
    made = said("projects", "create", "vision", "--store", "team-a", "--prefix", "x", "--backend", "box")
    assert made.strip() == f"project vision is created: {tenants / 'a'}/x/vision"
    (line,) = [line for line in said("projects", "list").splitlines() if "vision" in line]
    assert {"team-a", "box"} <= set(line.split())
    assert "in use by" in str(refused("stores", "remove", "team-a"))
    said("projects", "archive", "vision")
    (line,) = [line for line in said("projects", "list").splitlines() if "vision" in line]
    assert any(part.isdecimal() for part in line.split())
    said("backends", "remove", "box")
    assert "box" not in said("backends", "list")


def test_a_failing_store_is_reported_with_the_failed_step(tenants: Path) -> None:
    (tenants / "gone").mkdir()
    said("stores", "add", "gone", str(tenants / "gone"))
    shutil.rmtree(tenants / "gone")
    assert "store gone: list: " in str(refused("stores", "check", "gone"))
    said("stores", "remove", "gone")
    assert "not registered" in str(refused("stores", "check", "gone"))


@pytest.mark.parametrize("command", [("stores", "list"), ("backends", "list")])
def test_an_operator_is_refused(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch, command: tuple[str, str]
) -> None:
    monkeypatch.setenv("WATCHSTEP_TOKEN", service.operator_token)
    assert isinstance(refused(*command), ServiceError)


def test_the_capture_document_of_a_project(tmp_path: Path) -> None:
    said("projects", "create", "captured", "--store", "default")
    assert "has no capture document" in said("projects", "capture", "captured")
    file = tmp_path / "capture.yaml"
    file.write_text("collections: {activations: null}\n")
    assert "new capture document" in said("projects", "set-capture", "captured", str(file))
    shown = said("projects", "capture", "captured")
    assert "by admin, token" in shown
    assert '"activations": null' in shown
    stored = json.loads(said("projects", "capture", "captured", "--json"))
    assert stored["document"] == {"collections": {"activations": None}}
    file.write_text("collections: {activation: null}\n")
    error = refused("projects", "set-capture", "captured", str(file))
    assert f"capture file {file}: collections.activation" in error.what
    assert "did you mean activations?" in error.hint
    assert "No such file" in refused("projects", "set-capture", "captured", str(tmp_path / "none")).what
    assert "has no capture document" in said("projects", "remove-capture", "captured")
    assert json.loads(said("projects", "capture", "captured", "--json"))["document"] is None
