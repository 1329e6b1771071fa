"""Jobs that others launched: judged by rules from then on, and stopped; what cannot be is refused and changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.launch import recording
from tests.launch.backends.slurm.slurm_cluster import SlurmCluster
from tests.launch.beside import end_service_of
from tests.services.api.serving import serving
from tests.services.driving import make_service
from tests.services.jobs import eventually
from watchstep.errors import ConfigError, NotFoundError, ServiceError, WatchstepError
from watchstep.reading.run import open_run
from watchstep.stopping import EXIT_STOPPED
from watchstep.store.store import Store
from watchstep_launch import Command, Job, JobStatus, Slurm
from watchstep_rules import non_finite_values
from watchstep_services.auth import create_token
from watchstep_services.cli.jobs import app
from watchstep_services.db.engine import Database

SECONDS = 180.0


@dataclass
class Foreign:
    """A process that records, of which the launcher knows nothing."""

    store: Path
    project: str
    run: str
    fault: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"{self.store}/{self.project}/{self.run}"

    @property
    def job(self) -> str:
        return f"local:{self.process.pid}"

    def end(self) -> int:
        Path(f"{self.fault}.end").touch()
        return self.process.wait(SECONDS)


def command(store: Path, project: str, run: str, fault: Path) -> list[str]:
    return [sys.executable, recording.__file__, str(store), project, run, str(fault)]


def records(url: str) -> bool:
    try:
        return open_run(url).state() == "open"
    except NotFoundError:
        return False


@pytest.fixture(scope="module")
def started(beside: Path) -> Iterator[Callable[..., Foreign]]:
    """Starts programs that record; ends those that are left."""
    running: list[Foreign] = []

    def start(run: str, project: str = "default") -> Foreign:
        fault = beside / f"{project}-{run}.fault"
        process = subprocess.Popen(command(beside / "store", project, run, fault))
        running.append(Foreign(beside / "store", project, run, fault, process))
        eventually(lambda: records(running[-1].url), SECONDS)
        return running[-1]

    yield start
    for foreign in running:
        foreign.process.kill()
        foreign.process.wait()


@pytest.fixture(scope="module")
def foreign(started: Callable[..., Foreign]) -> Foreign:
    """One that is left to run."""
    return started("by-hand")


@pytest.mark.ci
def test_a_job_that_was_started_by_hand_is_stopped_by_the_rule_that_was_attached(
    started: Callable[..., Foreign],
) -> None:
    foreign = started("stopped")
    rules = [non_finite_values().stop()]
    job = Job.attach(foreign.url, foreign.job, rules)
    assert Job.attach(foreign.url, foreign.job, rules).record == job.record  # safe to repeat
    assert Job.reattach("stopped").record == job.record
    assert job.status().state == "running"
    eventually(lambda: job.run_state().info.state == "running", SECONDS)  # once the service has looked
    foreign.fault.touch()
    told = {event.type.removeprefix("io.watchstep."): event.data for event in job.events()}
    assert (told["stop.done"]["how"], told["stop.done"]["job"]) == ("cooperative", foreign.job)
    assert told["stop.done"]["tensor"] == "loss"
    assert told["run.ended"]["state"] == "stopped"
    assert foreign.process.wait(SECONDS) == EXIT_STOPPED
    assert job.wait(SECONDS) == JobStatus(
        "vanished", detail=job.status().detail
    )  # nobody here knows its code
    with pytest.raises(ConfigError, match=r"default/stopped is over \(stopped\)"):
        Job.attach(foreign.url, foreign.job)


@pytest.mark.ci
def test_a_healthy_job_is_left_alone_by_rules_of_a_file(
    started: Callable[..., Foreign], tmp_path: Path
) -> None:
    foreign = started("healthy")
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {rule: non_finite_values, actions: [stop]}\n  - {rule: loss_spike}\n")
    words = ["attach", "--run", "default/healthy", "--store", str(foreign.store), "--job", foreign.job]
    done = CliRunner().invoke(app, [*words, "--rules", str(rules)], catch_exceptions=False)
    assert done.output.splitlines() == [
        f"default/healthy: attempt {Job.reattach('healthy').record.attempt} is job {foreign.job}",
        (
            "  rule non_finite_values may stop it, and other jobs of project default, until revoked with "
            "'watchstep rules revoke-stop non_finite_values --project default --reason WHY'"
        ),
        "  rule loss_spike",
    ]
    job = Job.reattach("healthy")
    judging = {rule.name: (rule.origin, rule.granted_stop) for rule in job.run_state().rules}
    assert judging["non_finite_values"] == ("operator", True)
    assert judging["loss_spike"] == ("operator", False)
    assert foreign.end() == 0
    job.wait(SECONDS)
    assert job.run_state().info.state == "completed"


@pytest.mark.parametrize(
    ("run", "job", "error", "told"),
    [
        ("default/never", None, NotFoundError, "default/never: not found"),
        ("default/empty", None, ConfigError, "no attempt yet"),
        (None, "local:99999999", NotFoundError, "99999999 is not running"),
        (None, "local:1x", NotFoundError, "'1x' is not a process id"),
        (None, "1234", ConfigError, "KIND:ID"),
        (None, "slurm:", ConfigError, "KIND:ID"),
        (None, "pbs:1234", ConfigError, "unknown backend kind 'pbs'"),
    ],
)
def test_what_is_not_there_is_refused(
    foreign: Foreign, run: str | None, job: str | None, error: type[WatchstepError], told: str
) -> None:
    (foreign.store / "default" / "empty").mkdir(parents=True, exist_ok=True)
    (foreign.store / "default" / "empty" / "run.json").write_text(
        (foreign.store / "default" / "by-hand" / "run.json").read_text().replace("by-hand", "empty")
    )
    url = foreign.url if run is None else f"{foreign.store}/{run}"
    with pytest.raises(error, match=told):
        Job.attach(url, job or foreign.job, [non_finite_values().stop()])
    with pytest.raises(NotFoundError):
        Job.reattach("by-hand")  # nothing was written down
    assert foreign.process.poll() is None


def test_a_job_that_is_over_is_refused(foreign: Foreign) -> None:
    over = Command(
        submit_command="false", status_command="echo DONE code 3 {id}", stop_command="false",
        exit_code_pattern=r"code (\d+)", states={"DONE": "ended"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"command:7 is over \(ended with exit code 3\)"):
        Job.attach(foreign.url, "command:7", backend=over)


@pytest.mark.ci
def test_a_job_and_a_run_of_others_are_refused(foreign: Foreign, started: Callable[..., Foreign]) -> None:
    other = started("elsewhere", project="vision")
    Job.attach(foreign.url, foreign.job)
    with pytest.raises(ServiceError, match="bound in another project"):
        Job.attach(other.url, foreign.job, [non_finite_values().stop()])
    with pytest.raises(ServiceError, match=f"bound to job {foreign.job}"):
        Job.attach(foreign.url, other.job, [non_finite_values().stop()])
    rules = {rule.name: rule.origin for rule in Job.reattach("by-hand").run_state().rules}
    assert "operator" not in rules.values()  # what was refused attached no rule
    assert (foreign.process.poll(), other.process.poll()) == (None, None)


@pytest.mark.ci
def test_a_named_service_that_looks_elsewhere_is_refused(
    foreign: Foreign, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another").mkdir()
    service = make_service(sqlite, Store.open(str(tmp_path / "another")))
    monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(sqlite, "operator"))
    with serving(service) as url:
        with pytest.raises(ConfigError, match="reads it from"):
            Job.attach(foreign.url, foreign.job, [non_finite_values().stop()], service=url)
        monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(sqlite, "recorder"))
        with pytest.raises(ServiceError, match="role recorder may not"):
            Job.attach(foreign.url, foreign.job, [non_finite_values().stop()], service=url)
    with pytest.raises(ServiceError, match="does not respond"):
        Job.attach(foreign.url, foreign.job, [non_finite_values().stop()], service=url)


@pytest.fixture
def of_cluster(tmp_path: Path) -> Iterator[Path]:
    """A store with a service that knows of the cluster: its environment is that of the first launch."""
    yield tmp_path / "store"
    end_service_of(tmp_path / "store")


@pytest.mark.ci
def test_a_job_that_was_given_to_slurm_is_stopped_by_the_rule_that_was_attached(
    slurm: SlurmCluster, of_cluster: Path
) -> None:
    store, fault = of_cluster, of_cluster.with_name("fault")
    words: Any = command(store, "default", "by-sbatch", fault)
    wrap = f"--wrap=exec srun {' '.join(words)}"
    job_id = slurm.command("sbatch", "--parsable", f"--chdir={store.parent}", wrap).strip()
    eventually(lambda: records(f"{store}/default/by-sbatch"), SECONDS)
    job = Job.attach(
        f"{store}/default/by-sbatch",
        f"slurm:{job_id}",
        [non_finite_values().stop()],
        backend=Slurm(partition="all"),
    )
    with pytest.raises(NotFoundError, match="Slurm has no job"):
        Job.attach(f"{store}/default/by-sbatch", "slurm:999999999")
    fault.touch()
    told = {event.type.removeprefix("io.watchstep."): event.data for event in job.events()}
    assert (told["stop.done"]["how"], told["run.ended"]["state"]) == ("cooperative", "stopped")
    assert job.wait(SECONDS).exit_code == EXIT_STOPPED
