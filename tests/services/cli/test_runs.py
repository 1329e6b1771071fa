"""``watchstep runs``: of finished, damaged and empty runs, and with a running service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.sdk.reading.stored import small_run
from tests.services.cli.command_line import run_command
from tests.services.recording import PROJECT, Recording, damage_from, exploding_from
from watchstep import Hook
from watchstep.command import main as watchstep_main
from watchstep.errors import ConfigError
from watchstep.format import documents
from watchstep.format.documents import AttemptDocument, encode
from watchstep.format.layout import RUN_DOCUMENT, attempt_document, end_document
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
def store(tmp_path: Path) -> Path:
    small_run(tmp_path, "a")
    small_run(tmp_path, "b", factor=1.5)
    return tmp_path


@pytest.mark.ci
def test_compact(store: Path) -> None:
    done = run_command("runs", "compact", "a", "--store", store, "--delete-after", "0")
    assert done.returncode == 0, done.stderr
    assert "generation 1: 3 written, 3 deleted" in done.stdout
    assert "(12 recorded)" in run_command("runs", "show", "a", "--store", store).stdout


@pytest.mark.ci
def test_diff(store: Path) -> None:
    done = run_command("diff", "a", "b", "--store", store, "--most", "3")
    assert done.returncode == 1, done.stderr
    assert "first difference: step 0, loss" in done.stdout
    same = run_command("diff", "a", "a", "--store", store)
    assert same.returncode == 0
    assert "no difference in 36 rows" in same.stdout


@pytest.mark.ci
def test_the_seeds_of_a_run(store: Path) -> None:
    seeds = {"seed": 7, "generators": ["python", "torch"], "deterministic": True, "hash_seed": "0"}
    document = AttemptDocument("a", 1, seeds=seeds)
    (store / "default" / "a" / "attempts").mkdir()
    (store / "default" / "a" / "attempts" / "a.json").write_bytes(encode(document))
    shown = run_command("runs", "show", "a", "--store", store).stdout
    assert "seeds     attempt a: 7 (python, torch), deterministic algorithms, PYTHONHASHSEED 0" in shown
    assert json.loads(run_command("runs", "show", "a", "--store", store, "--json").stdout)["seeds"] == {
        "a": seeds
    }
    assert "seeds   " not in run_command("runs", "show", "b", "--store", store).stdout


@pytest.mark.ci
def test_export(store: Path) -> None:
    done = run_command("export", "--tensorboard", store / "events", "a", "--store", store)
    assert done.returncode == 0, done.stderr
    assert list((store / "events").rglob("events.out.tfevents.*"))
    again = run_command("export", "--tensorboard", store / "events", "a", "--store", store)
    assert again.returncode == 2
    assert "hint:" in again.stderr


@pytest.mark.timeout(120)
def test_a_damaged_run_affects_neither_the_list_nor_other_runs(tmp_path: Path) -> None:
    for run in ("good", "pipe", "ends"):
        with Hook(tmp_path, run=run) as hook:
            hook.log(loss=1.0)
            hook.step()
    (tmp_path / "default" / "pipe" / "run.json").unlink()
    os.mkfifo(tmp_path / "default" / "pipe" / "run.json")
    (end,) = (tmp_path / "default" / "ends" / "end").rglob("0.json")
    end.write_bytes(b"{")
    listed = run_command("runs", "list", "--store", tmp_path)
    states = {line.split()[1]: line.split()[-1] for line in listed.stdout.splitlines()[1:]}
    assert (listed.returncode, states) == (0, {"good": "completed", "pipe": "damaged", "ends": "damaged"})
    assert "default/pipe is damaged" in listed.stderr
    assert "run.json is not a regular file" in listed.stderr
    for run, state in (("good", "completed"), ("ends", "damaged")):
        shown = run_command("runs", "show", run, "--store", tmp_path)
        assert shown.returncode == 0
        assert f"state     {state}" in shown.stdout
        assert ("0.json" in shown.stdout) == (state == "damaged")


def shown(store: Path, *options: str) -> str:
    done = run_command("runs", "show", "default/night", "--store", store, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def registered(store: Path) -> Store:
    run = Store.open(store, create=True).child("default/night")
    run.create(RUN_DOCUMENT, documents.encode(documents.RunDocument("default", "night", time.time_ns(), ())))
    return run


def test_of_a_program_that_is_never_attached(tmp_path: Path) -> None:
    launcher = f"import sys; sys.argv = ['watchstep', *sys.argv[1:]]; from {watchstep_main.__module__} import main; main()"
    arguments = ("run", "--store", tmp_path, "--run", "night", "--", sys.executable, "-c", "print(1)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WATCHSTEP_")}
    subprocess.run([sys.executable, "-c", launcher, *arguments], check=True, env=environment)
    text = shown(tmp_path)
    assert "state     ended\n" in text
    assert (
        "reason    no segment was recorded: the program ended, and Watchstep was not attached to it: " in text
    )
    reason = json.loads(shown(tmp_path, "--json"))["reason"]
    assert reason.startswith("no segment was recorded: the program ended")


def test_of_a_program_that_has_not_begun(tmp_path: Path) -> None:
    registered(tmp_path)
    assert "reason    no segment was recorded: the program has not taken its first step" in shown(tmp_path)


def test_of_an_attempt_that_ends_before_its_first_step(tmp_path: Path) -> None:
    run = registered(tmp_path)
    run.create(attempt_document("a"), documents.encode(documents.AttemptDocument("a", 1)))
    assert "reason    no segment was recorded: an attempt began" in shown(tmp_path)
    end = documents.EndDocument(0, "failed", -1, 2, 0, "w", "ValueError: no data")
    run.create(end_document("a", 0), documents.encode(end))
    assert "reason    no segment was recorded: the attempt ended before the end of its first step\n" in shown(
        tmp_path
    )


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_recorded_or_damaged_run_has_no_reason(tmp_path: Path, options: tuple[str, ...]) -> None:
    with Hook(tmp_path, run="night") as hook:
        hook.log(loss=1.0)
        hook.step()
    assert "no segment" not in shown(tmp_path, *options)
    store = tmp_path / "other"
    run = registered(store)
    run.create("attempts/a.json", b"{")
    assert "no segment" not in shown(store, *options)


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


@pytest.mark.ci
def test_what_operators_do_with_an_alert(folder: Path) -> None:
    def told(*words: Any) -> str:
        return " ".join(watchstep(folder, *words).split())

    of = ("--project", PROJECT)
    stops = told("runs", "stops", f"{PROJECT}/run-1")
    assert "would have been stopped by rule mine" in stops
    assert "it was not stopped: the rule is not allowed to stop jobs" in stops
    assert "stop requested by rule nan_or_inf" in stops
    assert "allowed by a default rule" in stops
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
    listed = json.loads(told("runs", "alerts", f"{PROJECT}/run-1", "--json"))
    assert listed
    assert all(alert["fired_ns"] is not None for alert in listed)
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


@pytest.mark.ci
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


@pytest.mark.ci
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
    assert lines[1].startswith("cause   at step 101: norm of second.weight:gradient is 1e+06")
    assert lines[2].startswith("check   ")
    member = re.compile(r"alerts  exploding_gradient: warning, (firing|resolved), since step 100")
    assert any(map(member.fullmatch, lines))
    assert f"watchstep runs alerts {PROJECT}/run-1 explains each alert" in lines
    assert "usual ranges at step 100 (attempt a1)" in shown
    assert re.search(
        r"^  second.weight:gradient: (rms|mean|abs_max) 1e\+06 at step 100, usually ", shown, re.MULTILINE
    )
