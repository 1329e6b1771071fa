"""Launched programs show a token that may record and no more, where the launcher's own can make one."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.api.serving import serving
from tests.services.driving import Driven
from watchstep.capture.service_client import ServiceAddress
from watchstep.errors import ServiceError
from watchstep.launch.run_command import FoundService
from watchstep_services.estimator.recorder_token import LIFETIME_SECONDS, recorder_token
from watchstep_services.roles import Identity, Role
from watchstep_services.tokens import create_token, identify


@pytest.fixture
def url(driven_sqlite: Driven) -> Iterator[str]:
    with serving(driven_sqlite.service) as url:
        yield url


def found(url: str, operator: str, recorder: str = "") -> FoundService:
    return FoundService(ServiceAddress(url, operator), ServiceAddress(url, recorder or operator))


def held_by(driven: Driven, token: str) -> Identity:
    identity = identify(driven.service.database, token)
    assert identity is not None
    return identity


def test_an_admin_gives_its_jobs_a_recorders_token_of_their_project(driven_sqlite: Driven, url: str) -> None:
    admin = create_token(driven_sqlite.service.database, "admin")
    before = held_by(
        driven_sqlite,
        create_token(driven_sqlite.service.database, "viewer", lifetime_seconds=LIFETIME_SECONDS),
    )
    held = held_by(driven_sqlite, recorder_token(found(url, admin), "vision", "r" * 200))
    assert (held.role, held.project, len(held.name)) == ("recorder", "vision", 128)
    assert held.expires_ns is not None
    assert before.expires_ns is not None
    assert held.expires_ns >= before.expires_ns


@pytest.mark.parametrize("role", ["operator", "viewer"])
def test_where_none_can_be_made_it_is_told(
    driven_sqlite: Driven, url: str, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    own = create_token(driven_sqlite.service.database, role)
    with caplog.at_level(logging.WARNING):
        assert recorder_token(found(url, own), "vision", "r1") == own
    assert "launcher's own token" in caplog.text
    assert own not in caplog.text


def test_a_token_that_was_named_for_jobs_is_theirs(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        recorder_token(found("http://127.0.0.1:9", "of an operator", "of a job"), "vision", "r1")
        == "of a job"
    )
    assert recorder_token(found("http://127.0.0.1:9", ""), "vision", "r1") == ""
    assert caplog.text == ""
    with pytest.raises(ServiceError, match="no answer"):
        recorder_token(found("http://127.0.0.1:9", "of an operator"), "vision", "r1")


@pytest.mark.parametrize(("role", "code"), [("recorder", 7), ("viewer", 2)])
def test_a_program_under_watchstep_run_starts_with_a_recorders_token(
    driven_sqlite: Driven, url: str, role: Role, code: int
) -> None:
    store = driven_sqlite.service.settings.store
    done = subprocess.run(
        [
            Path(sys.executable).with_name("watchstep"), "run", "--store", store, "--project", "vision", "--run", "r1",
            "--service", url, "--", sys.executable, "-S", "-c", "raise SystemExit(7)",
        ],
        env={"PATH": "/usr/bin:/bin", "WATCHSTEP_TOKEN": create_token(driven_sqlite.service.database, role)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if role == "recorder":
        assert "a recorder token may not bind a job" in done.stderr
        assert "watchstep attach --job local:" in done.stderr
        assert driven_sqlite.run(1).run == "r1"
