"""Commands for stops, silences and acknowledgements, with a running service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.services.recording import PROJECT, Recording, damage_from, exploding_from
from watchstep.errors import ConfigError
from watchstep.platform.transport import ServiceRefusedError
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.cli.main import app
from watchstep_services.core.settings import load_settings
from watchstep_services.db.models import AlertInstanceRow
from watchstep_services.runs.registration import register
from watchstep_services.serve.embedded import EmbeddedService

MINE = {"rule": "non_finite_values", "name": "mine", "params": {"only_nan": True}, "actions": ["stop"]}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A store with a run that a service has found NaN in."""
    place = tmp_path / "store"
    store = Store.open(place, create=True)
    settings = load_settings(store=str(place), home=place / ".watchstep", sweep_seconds=0.05)
    with EmbeddedService(settings) as service:
        register(service.service, PROJECT, "run-1", (RuleConfig.model_validate(MINE),), "recorder")
        Recording(store).begin().write(0, 0, 7, damage_from(5))

        def fired() -> bool:
            with service.database.read() as session:
                return session.query(AlertInstanceRow).filter_by(name="mine").count() == 1

        assert service.wait_until(fired, 60.0)
        yield place


def watchstep(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--store", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_what_operators_do_with_an_alert(folder: Path) -> None:
    def told(*words: Any) -> str:
        return " ".join(watchstep(folder, *words).split())

    of = ("--project", PROJECT)
    stops = told("runs", "stops", f"{PROJECT}/run-1")
    assert "would have been stopped by rule mine" in stops
    assert "it was not stopped: the rule is not allowed to stop jobs" in stops
    assert "stop requested by rule nan_or_inf" in stops
    assert "allowed by the owner's rule file" in stops
    assert "mine may stop jobs of vision" in told("rules", "allow-stop", "mine", "--reason", "tried", *of)
    assert "tried" in told("rules", "stop-grants", *of)
    assert "may no longer stop jobs of vision" in told(
        "rules", "revoke-stop", "mine", "--reason", "wolf", *of
    )
    assert "acknowledged" in told("runs", "acknowledge", f"{PROJECT}/run-1", "mine", "--comment", "on it")
    alerts = told("runs", "alerts", f"{PROJECT}/run-1")
    assert re.search(
        r"taken acknowledged by serve in \S+ \(operator, token \S+\), [-0-9]+ [:0-9]+: on it", alerts
    )
    assert "silent" not in alerts
    assert "notifications are repeated again" in told(
        "runs", "acknowledge", f"{PROJECT}/run-1", "mine", "--withdraw"
    )
    assert "run-1 mine" in told("silences", "preview", "name=mine", *of)
    assert "silence 1" in told("silences", "create", "name=mine", "--reason", "a sweep", *of)
    assert "a sweep" in told("silences", "list", *of)
    alerts = told("runs", "alerts", f"{PROJECT}/run-1")
    assert "acknowledged" not in alerts
    assert len(re.findall(r"silent until [-0-9]+ [:0-9]+ by silence 1 of .*?: a sweep", alerts)) == 1
    assert "silence 1 has expired" in told("silences", "expire", "1", *of)
    assert "a sweep" not in told("silences", "list", *of)
    assert "a sweep" in told("silences", "list", "--all", *of)


def test_the_list_of_runs_shows_alerts_of_a_local_store_without_a_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATCHSTEP_TOKEN", raising=False)
    Recording(Store.open(folder), run="unknown-yet").begin()
    head, *rows = watchstep(folder, "runs", "list").splitlines()
    assert head.split()[-1] == "FIRING"
    # Both alerts of the NaN: of the default rule, and of the recorder's.
    assert {row.split()[1]: row.split()[-1] for row in rows}["run-1"] == "3"


def test_the_list_of_runs_if_the_service_does_not_respond(folder: Path) -> None:
    note = folder / ".watchstep" / "service.json"
    for content in (json.dumps(json.loads(note.read_text()) | {"url": "http://127.0.0.1:9"}), "damaged"):
        note.write_text(content)
        listed = watchstep(folder, "runs", "list")
        assert "alerts are not shown" in listed
        assert "FIRING" not in listed
        assert "run-1" in listed
        shown = watchstep(folder, "runs", "show", f"{PROJECT}/run-1")
        assert "incidents are not shown" in shown
        assert "COLLECTION" in shown


def test_requests_to_a_run(folder: Path) -> None:
    run = f"{PROJECT}/run-1"
    assert "of the next step" in watchstep(folder, "runs", "snapshot", run)
    assert "of step 90" in watchstep(folder, "runs", "snapshot", run, "--step", "90")
    assert "weights every 50 steps" in watchstep(folder, "runs", "cadence", run, "weights=50")
    assert "the workers choose the cadence" in watchstep(folder, "runs", "cadence", run)
    assert "new attempts may start" in watchstep(folder, "runs", "allow-restart", run, "--reason", "mended")
    assert "on hold" in watchstep(folder, "runs", "hold", run, "--reason", "for the paper")
    assert "released" in watchstep(folder, "runs", "release", run)
    with pytest.raises(ConfigError, match="not of the form COLLECTION=STEPS"):
        watchstep(folder, "runs", "cadence", run, "weights=often")
    with pytest.raises(ServiceRefusedError, match="administer"):  # the token of `serve` is an operator's
        watchstep(folder, "runs", "delete", run, "--yes")


def test_tensors_that_deviate_at_an_incident_are_shown(tmp_path: Path) -> None:
    place = tmp_path / "store"
    store = Store.open(place, create=True)
    settings = load_settings(store=str(place), home=place / ".watchstep", sweep_seconds=0.05)
    with EmbeddedService(settings) as service:
        register(service.service, PROJECT, "run-1", (), "recorder")
        Recording(store).begin().write(0, 0, 120, exploding_from(100))

        def fired() -> bool:
            with service.database.read() as session:
                return session.query(AlertInstanceRow).count() > 0

        assert service.wait_until(fired, 60.0)
        shown = watchstep(place, "runs", "alerts", f"{PROJECT}/run-1")
        run = watchstep(place, "runs", "show", f"{PROJECT}/run-1")
    lines = [line.strip() for line in run[run.index("incident") : run.index("COLLECTION")].splitlines()]
    assert lines[0] == "incident  step 100, likeliest cause exploding_gradient"
    assert lines[1].startswith("cause   norm of second.weight:gradient is 1e+06")
    assert lines[2].startswith("check   ")
    member = re.compile(r"alerts  exploding_gradient: warning, (firing|resolved), since step 100")
    assert any(map(member.fullmatch, lines))
    assert f"watchstep runs alerts {PROJECT}/run-1 explains each alert" in lines
    assert "usual ranges at step 100 (attempt a1)" in shown
    assert re.search(
        r"^  second.weight:gradient: (rms|mean|abs_max) 1e\+06 at step 100, usually ", shown, re.MULTILINE
    )
