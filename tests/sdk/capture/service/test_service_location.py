"""Locating a service on this machine, whatever the path of its location file contains."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import watchstep
from tests.services.jobs import eventually
from watchstep.capture.health import RecorderHealth
from watchstep.capture.service.location import ServiceLocation, find_service, make_home
from watchstep.capture.service.registration import LAUNCH, LaunchState
from watchstep.errors import ConfigError
from watchstep.platform.folders import HOME
from watchstep.platform.process import ProcessIdentity

URL = "http://127.0.0.1:9"
OTHER_USER = 12345


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store on this machine, with a folder for a service in it and another home elsewhere."""
    (tmp_path / "runs" / ".watchstep").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    return tmp_path / "runs"


def note_of(watched: Path, **changes: Any) -> str:
    process = asdict(ProcessIdentity.of(os.getpid()))
    note = {
        "url": URL,
        "operator_token": "o",
        "recorder_token": "r",
        "stores": ["s3://first/runs", str(watched)],
        "process": process,
    }
    return json.dumps({**note, **changes})


def place_of(store: Path) -> Path:
    return store / ".watchstep" / "service.json"


def test_the_note_of_a_running_service_names_it(store: Path) -> None:
    place_of(store).write_text(note_of(store))
    found = find_service("", store.as_uri())
    assert found is not None
    assert (found.operator.url, found.operator.token, found.recorder.token) == (URL, "o", "r")


def pipe(place: Path) -> None:
    os.mkfifo(place)


def folder(place: Path) -> None:
    place.mkdir()


def sparse(place: Path) -> None:
    with place.open("wb") as file:
        file.truncate(1 << 40)


def link_to_a_valid_note(place: Path) -> None:
    elsewhere = place.with_name("elsewhere.json")
    elsewhere.write_text(note_of(place.parent.parent))
    place.symlink_to(elsewhere)


@pytest.mark.parametrize("make", [pipe, folder, sparse, link_to_a_valid_note])
def test_only_a_small_regular_file_is_read(store: Path, make: Callable[[Path], None]) -> None:
    make(place_of(store))
    with pytest.raises(ConfigError, match="the note of a service is invalid"):
        find_service("", store.as_uri())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "\xff",
        "[" * 60_000,
        '{"url": ' + "9" * 5000 + "}",
        note_of(Path("/runs"), url=7),
        note_of(Path("/runs"), url="ftp://here"),
        note_of(Path("/runs"), url="http://[::1"),
        note_of(Path("/runs"), url="http://here:port"),
        note_of(Path("/runs"), recorder_token="a\r\nX-Header: b"),
        note_of(Path("/runs"), stores=[]),
        note_of(Path("/runs"), stores="/runs"),
        note_of(Path("/runs"), stores=["gopher://there/runs"]),
        note_of(Path("/runs"), stores=["file://[/runs"]),
        note_of(Path("/runs"), stores=["file:///runs%00"]),
        note_of(Path("/runs"), process={"pid": 1}),
        note_of(Path("/runs"), process={"pid": "../tmp", "start_ticks": 1, "boot": "", "host": ""}),
        note_of(Path("/runs"), process=None),
    ],
)
def test_a_damaged_note_is_a_configuration_error(store: Path, content: str) -> None:
    place_of(store).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"service\.json: the note of a service is invalid"):
        find_service("", store.as_uri())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_the_note_of_another_user_is_not_read(store: Path) -> None:
    place_of(store).write_text(note_of(store))
    os.chown(place_of(store), OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match="belongs to another user"):
        find_service("", store.as_uri())


def test_a_damaged_note_in_the_store_does_not_hide_the_service_of_the_home(
    store: Path, tmp_path: Path
) -> None:
    place_of(store).write_text("damaged")
    (tmp_path / "home" / "service.json").write_text(note_of(store))
    found = find_service("", store.as_uri())
    assert found is not None
    assert found.operator.url == URL


def test_a_pipe_in_place_of_the_note_is_a_fault_in_health(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(place_of(store))
    state = LaunchState(ServiceLocation.of("", store.as_uri()), run="first", attempt="a")
    monkeypatch.setenv(LAUNCH, state.encode())
    with watchstep.Hook(store, run="first") as hook:
        eventually(lambda: "the note of a service" in hook.health["faults"].get("registration", ""), 60)


def test_a_recorder_that_looks_for_a_moved_service_reports_a_damaged_note(store: Path) -> None:
    place_of(store).write_text("damaged")
    health = RecorderHealth()
    state = LaunchState(ServiceLocation.of("", store.as_uri()))
    assert state.recorder_address(health) is None
    assert "the note of a service" in health.as_data()["faults"]["service note"]


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "store" / ".watchstep"
    make_home(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    make_home(home)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    if home.stat().st_uid == 0:
        make_home(home)  # root is trusted by all
        os.chown(home, OTHER_USER + 1, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        make_home(home)
