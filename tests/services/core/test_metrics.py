"""What the service counts, as Prometheus reads it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.services.driving import Driven, make_service
from tests.services.recording import PROJECT, Recording, nan_from
from tests.services.redis import free_port
from watchstep.store.store import Store
from watchstep_services.core.settings import load_settings
from watchstep_services.core.telemetry import metrics
from watchstep_services.core.telemetry.metrics import registry, serve, written
from watchstep_services.db.engine import Database
from watchstep_services.db.metrics import FIGURES, DatabaseFigures, waiting_seconds
from watchstep_services.dispatch.dispatch import dispatch


def shown(text: str) -> dict[str, float]:
    """Samples by name and labels, as one writes them in PromQL."""
    return {
        sample.name + ("{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}" if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip


def read(*figures: DatabaseFigures) -> dict[str, float]:
    return shown(written(registry(*figures), "")[0].decode())


def grown(before: dict[str, float], name: str) -> float:
    return read().get(name, 0.0) - before.get(name, 0.0)


def test_names_follow_prometheus_conventions() -> None:
    names = [name for name, *_ in metrics.described()]
    assert len(names) == len(set(names))
    for name, kind, labels, text in metrics.described():
        assert re.fullmatch(r"watchstep_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter"), name
        if kind in {"histogram", "summary"}:
            assert name.endswith("_seconds")
        assert text.endswith(".")
        assert not set(labels) & {"run", "project", "attempt", "name", "url", "token"}
    assert not set(names) & set(FIGURES)


@pytest.mark.ci
def test_an_evaluation_a_notification_and_a_lost_lease_are_counted(driven_sqlite: Driven) -> None:
    before = read()
    run_id = driven_sqlite.register()
    recording = driven_sqlite.recording().begin()
    driven_sqlite.judge(run_id, recording.write(0, 0, 3), recording.write(1, 4, 7, nan_from(6)))
    assert driven_sqlite.evaluate(run_id).outcome == "idle"
    assert grown(before, "watchstep_evaluations_total{outcome=committed}") >= 1
    assert grown(before, "watchstep_evaluations_total{outcome=idle}") == 1
    assert grown(before, "watchstep_segments_total{result=read}") == 2
    assert grown(before, "watchstep_evaluation_lag_seconds_count") == 2
    assert grown(before, "watchstep_rule_seconds_count{rule=non_finite_values}") >= 1
    (stop, *_) = driven_sqlite.actions(run_id, "stop")
    assert dispatch(driven_sqlite.service, stop.id) is not None
    assert sum(
        value - before.get(name, 0.0)
        for name, value in read().items()
        if name.startswith("watchstep_action_tries_total{kind=stop")
    ) == len(driven_sqlite.tries(stop.id))


def test_what_stands_in_the_database(database: Database, folder_store: Store) -> None:
    driven = Driven(make_service(database, folder_store))
    figures = DatabaseFigures(database)
    assert {family.name for family in figures.describe()} == set(FIGURES)
    run_id = driven.register()
    recording = Recording(folder_store).begin()
    driven.announce(run_id, recording.write(0, 0, 3), recording.write(1, 4, 7))
    values = read(figures)
    assert values["watchstep_database_up"] == 1
    assert values["watchstep_runs{state=created}"] == 1
    assert values["watchstep_queue_length{queue=runs}"] == 1
    assert values["watchstep_queue_age_seconds{queue=runs}"] >= 0
    assert values["watchstep_segments_waiting"] == 2
    assert {project: waited >= 0 for project, waited in waiting_seconds(database).items()} == {PROJECT: True}
    driven.settle(run_id)
    settled = read(DatabaseFigures(database))
    assert settled["watchstep_segments_waiting"] == 0
    assert waiting_seconds(database) == {}
    assert settled["watchstep_queue_length{queue=runs}"] == 0


def test_a_database_that_does_not_answer_is_told(sqlite: Database) -> None:
    with sqlite.write() as session:
        session.connection().exec_driver_sql("DROP TABLE actions")
    values = read(DatabaseFigures(sqlite))
    assert values["watchstep_database_up"] == 0
    assert not [name for name in values if name.startswith("watchstep_queue")]


def test_connections_are_in_use_or_idle(sqlite: Database) -> None:
    def connections() -> tuple[float, float]:
        values = read()
        in_use, idle = (
            values[f"watchstep_database_connections{{state={state}}}"] for state in ("in_use", "idle")
        )
        return in_use - before[0], in_use + idle - sum(before)

    before = (0.0, 0.0)
    used, opened = connections()
    before = (used, opened - used)
    with sqlite.engine.connect() as first, sqlite.engine.connect():
        assert connections()[0] == 2
        first.invalidate()
    assert connections()[0] == 0
    sqlite.engine.dispose()
    assert connections()[1] <= 0


@pytest.mark.ci
def test_what_recorders_say_grows_and_takes_no_name_from_them() -> None:
    before = read()
    metrics.count_recorder_report({}, {"counts": {"rows": 10, "dropped_rows": 2, "mine": 5}})
    metrics.count_recorder_report({"counts": {"rows": 10}}, {"counts": {"rows": 15}})
    metrics.count_recorder_report({"counts": {"rows": 15}}, {"counts": {"rows": 4}})  # begun anew
    metrics.count_recorder_report(
        {"counts": "x"}, {"counts": {"rows": "many", "spilled_rows": -3, "faults": True}}
    )
    assert grown(before, "watchstep_recorder_rows_total{outcome=written}") == 19
    assert grown(before, "watchstep_recorder_rows_total{outcome=dropped}") == 2
    assert grown(before, "watchstep_recorder_rows_total{outcome=spilled}") == 0
    assert grown(before, "watchstep_recorder_faults_total") == 0
    assert not [name for name in read() if "mine" in name]


def test_a_port_of_their_own(sqlite: Database) -> None:
    settings = load_settings(metrics_port=free_port())
    end = serve(settings, registry(DatabaseFigures(sqlite)))
    try:
        answer = httpx.get(f"http://127.0.0.1:{settings.metrics_port}/metrics")
        assert answer.is_success
        assert shown(answer.text)["watchstep_database_up"] == 1
    finally:
        end()
    assert serve(load_settings(), registry()) is not None  # no port: nothing listens


SHARED = """
import os, sys
from watchstep_services.core.telemetry import metrics
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.core.telemetry.metrics import registry, written
if os.fork() == 0:
    metrics.CONNECTIONS.labels("idle").inc(3)
    metrics.EVALUATIONS.labels("committed").inc(2)
    os._exit(0)
os.wait()
metrics.EVALUATIONS.labels("committed").inc()
metrics.CONNECTIONS.labels("idle").inc()
sys.stdout.write(written(registry(), "")[0].decode())
"""


@pytest.mark.ci
def test_processes_that_share_a_folder_are_added_up(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = shown(done.stdout)
    assert values["watchstep_evaluations_total{outcome=committed}"] == 3
    assert (
        values["watchstep_database_connections{state=idle}"] == 1
    )  # the child is gone, and its connections with it
    assert values["watchstep_build_info{version=0.1.0}"] == 1


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_both_forms_are_written(accept: str) -> None:
    text, kind = written(registry(), accept)
    assert ("openmetrics" in kind) == bool(accept)
    assert text.rstrip().endswith(b"# EOF") == bool(accept)
