"""Runs on each provider's server: recorded by commands and stopped, through an outage, and with credentials that may not write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.end_to_end.programs import FAULTY_IN_NUMPY
from tests.sdk.faults.accounts import STEPS, accounted, plain_losses, train
from tests.sdk.training import EVERY_STEP, Training
from tests.stores.servers import Seaweed, StoreServer
from watchstep import Bounds, Cadence, CaptureConfig, Collection, Hook, open_run

COMMAND = Path(sys.executable).with_name("watchstep")
HASTY = replace(EVERY_STEP, bounds=Bounds(flush_seconds=0.01, close_seconds=1.0))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No service or profile of the caller is used."""
    monkeypatch.setenv("WATCHSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WATCHSTEP_PROFILES", str(tmp_path / "profiles.yaml"))
    monkeypatch.setenv("WATCHSTEP_PORT", "0")


def command(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=300, cwd=cwd
    )


@pytest.mark.timeout(600)
def test_commands_record_a_run_and_stop_it(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_OVERHEAD_BUDGET", "none")
    (tmp_path / "train.py").write_text(FAULTY_IN_NUMPY)
    serving = subprocess.Popen([COMMAND, "serve", "--store", url], stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        assert serving.stdout.readline() == f"watchstep: watching {url}\n"
        done = command("run", "--store", url, "--run", "r", "--", sys.executable, "train.py", cwd=tmp_path)
    finally:
        serving.terminate()
        serving.communicate(timeout=600)
    assert done.returncode == 86, done.stderr
    assert "rule nan_or_inf: bad from step 50" in done.stderr
    listed = command("runs", "list", "--store", url)
    assert (listed.returncode, "stopped" in listed.stdout) == (0, True), listed
    run = open_run(f"{url}/default/r")
    (end,) = run.ends()
    assert (end.state, end.last_step >= 50) == ("stopped", True)
    gradients = run.tensor("w:gradient").statistics()
    assert gradients["step"].to_pylist()[:51] == list(range(51))
    assert [nan > 0 for nan in gradients["nan"].to_pylist()[:51]] == 50 * [False] + [True]


def test_the_three_lines_of_the_readme(url: str) -> None:
    collections = {**CaptureConfig().collections, "weights": Collection(tensors=Cadence(every=2))}
    hook = Hook(url, run="r", config=CaptureConfig(collections=collections))
    training = Training()
    hook.watch(training.model, training.optimizer)
    losses = training.run(4)
    hook.close()
    assert hook.health["faults"] == {}
    run = open_run(f"{url}/default/r")
    assert run.losses()["value"].to_pylist() == losses
    assert run.tensor("0.weight:gradient").statistics().to_pandas()["rms"].gt(0).all()
    assert run.tensor("0.weight").value(2).shape == (16, 8)


def test_rows_of_an_outage_are_synced(url: str, server: StoreServer, spill_root: Path) -> None:
    hook = Hook(url, run="r", config=HASTY)

    def end_server(step: int) -> None:
        if step == STEPS // 2:
            while not hook.health["counts"].get("objects"):
                os.sched_yield()
            server.kill()

    try:
        watched = train(hook, each=end_server)
        hook.close()
        assert watched.losses == plain_losses()
        assert hook.health["counts"]["spilled_rows"] > 0
        left = command("sync")
        assert left.returncode == 1
        assert f"store {url}: cannot" in left.stdout
        assert "denied" not in left.stdout
    finally:
        server.kill()
        server.start()
    done = command("sync")
    assert (done.returncode, done.stderr) == (0, ""), done
    run = open_run(hook.run_url)
    assert run.steps() == list(range(STEPS))
    assert len(run.rows()) == accounted(hook.health)
    assert not list(spill_root.glob("*/*.arrow"))


def test_a_recorder_that_may_not_write_spills(
    lead_to: Callable[[str], Seaweed], monkeypatch: pytest.MonkeyPatch, spill_root: Path
) -> None:
    server = lead_to("s3")
    url = server.url("may-not-write")
    for name, value in server.identity("reader").items():
        monkeypatch.setenv(name, value)
    hook = Hook(url, run="r", config=HASTY)
    watched = train(hook)
    hook.close()
    assert watched.losses == plain_losses()
    fault = hook.health["faults"]["store"]
    assert f"store {url}: access denied, cannot write 'default/r/run.json' (AccessDenied)" in fault or (
        f"store {url}: access denied, cannot write 'run.json' (AccessDenied)" in fault
    ), fault
    assert hook.health["counts"]["spilled_rows"] == accounted(hook.health) > 0
    for name, value in server.identity("admin").items():
        monkeypatch.setenv(name, value)
    done = command("sync")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert open_run(hook.run_url).steps() == list(range(STEPS))
    assert not list(spill_root.glob("*/*.arrow"))
