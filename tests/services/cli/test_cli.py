"""The commands, as a user types them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.services.cli.command_line import run_command
from tests.services.recording import PROJECT, Recording
from watchstep import Hook
from watchstep.store.store import Store
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_services.core.settings import load_settings
from watchstep_services.runs.registration import register
from watchstep_services.serve.embedded import EmbeddedService

WATCHSTEP = Path(sys.executable).with_name("watchstep")


def started_anew(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as a shell starts it."""
    return subprocess.run(
        [WATCHSTEP, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=plain_environment(),
    )


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WATCHSTEP_")}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with Hook(folder, run="night", project="vision") as hook:
        for step in range(30):
            hook.log(loss=3.0 - step / 10, accuracy=0.5)
            hook.step()
    return folder


@pytest.mark.ci
def test_list(store: Path) -> None:
    done = started_anew("runs", "list", "--store", store)
    assert done.returncode == 0
    assert "vision" in done.stdout
    assert "completed" in done.stdout


@pytest.mark.parametrize("name", ["night", "vision/night", "{store}/vision/night"])
def test_show(store: Path, name: str) -> None:
    done = run_command("runs", "show", name.format(store=store), "--store", store)
    assert done.returncode == 0, done.stderr
    assert "0 to 29 (30 recorded)" in done.stdout
    assert "3 at first, 0.1 at last" in done.stdout


def test_show_of_a_run_that_repeated_its_steps_without_a_loss(tmp_path: Path) -> None:
    for name, value in (("first_loss", 1.0), ("second_loss", -math.inf)):
        with Hook(tmp_path, run="night", project="vision") as hook:
            for _ in range(3):
                hook.log({name: value})
                hook.step()
    done = run_command("runs", "show", "night", "--store", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "first_loss only in earlier attempts" in done.stdout
    assert "second_loss -inf at first, -inf at last" in done.stdout


def test_stats(store: Path) -> None:
    done = run_command("runs", "stats", "night", "loss", "--store", store, "--last", "2")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["STEP", "28", "29"]


def test_rules() -> None:
    assert "non_finite_values" in run_command("rules", "list").stdout
    shown = run_command("rules", "show", "vanishing_gradient").stdout
    assert "threshold" in shown
    assert "1e-07" in shown


def test_version() -> None:
    assert run_command("--version").stdout.strip() == "0.1.0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs", "show", "nope"], "run 'nope'"),
        (["runs", "show", "../night"], "name '..' cannot be used"),
        (["runs", "stats", "night", "nope"], "tensor 'nope'"),
        (["runs", "list", "--store", "/no/such/folder"], "does not exist"),
        (["runs", "alerts", "vision/night"], "no service runs for"),
        (["rules", "show", "nope"], "unknown rule 'nope'"),
        (["serve", "--rules", "/no/rules.yaml"], "rule file /no/rules.yaml"),
        (["serve", "--store", "/dev/null/x"], "/dev/null/x"),
        (["serve", "--host", "999.0.0.1"], "999.0.0.1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_input_is_reported_in_two_lines(store: Path, arguments: list[str], says: str) -> None:
    extra = [] if "--store" in arguments or arguments[0] == "rules" else ["--store", str(store)]
    done = run_command(*arguments, *extra)
    assert done.returncode == 2
    assert says in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WATCHSTEP_RULES_FILE", "/no/rules.yaml", "rule file /no/rules.yaml"),
        ("WATCHSTEP_RECEIVERS_FILE", "/no/receivers.yaml", "receivers file /no/receivers.yaml"),
        ("WATCHSTEP_HOST", "999.0.0.1", "address 999.0.0.1:8642"),
        ("WATCHSTEP_PORT", "70000", "WATCHSTEP_PORT = 70000"),
        ("WATCHSTEP_HOME", "/dev/null/home", "home /dev/null/home"),
    ],
)
def test_serve_reads_its_settings_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    done = run_command("serve", "--store", tmp_path / "runs")
    assert done.returncode == 2
    assert says in done.stderr


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that is for people: the log, whose lines begin with a date, goes to the same place here."""
    assert process.stdout is not None
    while (line := process.stdout.readline())[:4].isdecimal():
        pass
    return line


@contextmanager
def serving(store: Path) -> Iterator[subprocess.Popen[str]]:
    with started(store, len(DEFAULT_RULES) + 1) as (process, told):
        assert "rule nan_or_inf (critical, after 1 step, stops the job)" in told[0]
        assert told[-1] == "may stop jobs: nan_or_inf (default rule)"
        yield process


@contextmanager
def started(
    store: Path, lines: int, *options: str | Path
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A service, and so many lines that it says of rules."""
    process = subprocess.Popen(
        [WATCHSTEP, "serve", "--store", store, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**plain_environment(), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        told = [line_of(process) for _ in range(lines + 2)]
        assert "watching" in told[0]
        assert "http://127.0.0.1:" in told[-1]
        yield process, [line.removeprefix("watchstep: ").rstrip() for line in told[1:-1]]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stdout.close()


@pytest.mark.ci
def test_serve_is_detected_by_run_refuses_another_in_its_home_prints_alerts_and_exits_cleanly(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as process:
        note = json.loads((tmp_path / ".watchstep" / "service.json").read_text())
        assert (tmp_path / ".watchstep" / "service.json").stat().st_mode & 0o777 == 0o600
        done = started_anew(
            "run", "--store", tmp_path, "--run", "r", "--", sys.executable, "-c", PRINT_SERVICE
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [note["url"], note["recorder_token"]]
        another = run_command("serve", "--store", tmp_path, "--port", "0")
        assert another.returncode == 2
        assert "another watchstep service runs there" in another.stderr
        with Hook(tmp_path, run="ill", project="vision") as hook:
            for step in range(4):
                hook.log(loss=float("nan") if step >= 2 else 1.0)
                hook.step()
        assert process.stdout is not None
        block = [line_of(process) for _ in range(6)]
        assert block[0] == "watchstep: vision/ill: non_finite_values (warning) firing: bad from step 2\n"
        assert [line.split()[0] for line in block[1:]] == ["seen", "where", "against", "since", "usually"]
        shown = run_command("runs", "alerts", "vision/ill", "--store", tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("non_finite_values (warning) firing: bad from step 2 (attempt ")
        assert "  seen    at step 3: 1 NaN among 1 elements of loss, 0 tolerated\n" in shown.stdout
        assert "error: rule" not in shown.stdout
        # Which others have no data depends on how much of the run was read by then.
        [without] = [line for line in shown.stdout.splitlines() if line.startswith("no data: ")]
        assert "class_imbalance" in without.removeprefix("no data: ").split(", ")
        missing = run_command("runs", "alerts", "vision/well", "--store", tmp_path)
        assert missing.returncode == 2
        assert "run vision/well: not found\n  hint: 'watchstep runs list', " in missing.stderr
    assert not (tmp_path / ".watchstep" / "service.json").exists()


@pytest.mark.ci
def test_commands_without_a_store_use_the_only_service_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)
    first, second = (
        load_settings(home=tmp_path / f"home-{number}", store=str(tmp_path / f"store-{number}"))
        for number in (1, 2)
    )
    with EmbeddedService(first) as service:
        Recording(Store.open(first.store)).begin()
        register(service.service, PROJECT, "run-1", (), "recorder")
        listed = run_command("runs", "list", "--project", PROJECT)
        assert "run-1" in listed.stdout, listed.stderr
        shown = run_command("runs", "show", f"{PROJECT}/run-1")
        assert f"{first.store}/{PROJECT}/run-1" in shown.stdout, shown.stderr
        with EmbeddedService(second):
            refused = run_command("runs", "list")
            assert refused.returncode != 0
            assert "2 services run on this machine" in refused.stderr
            assert first.store in refused.stderr
            assert second.store in refused.stderr
            stopped = run_command("runs", "events", f"{PROJECT}/run-1", "--store", second.store)
            assert "run vision/run-1: not found" in stopped.stderr
        other = run_command("runs", "events", f"{PROJECT}/run-1", "--store", "s3://bucket/of-nobody")
        assert (
            f"no service runs for s3://bucket/of-nobody; the services here watch {first.store}"
            in other.stderr
        )
    assert "watchstep-runs does not exist" in run_command("runs", "list").stderr


@pytest.mark.ci
def test_serve_prints_the_actions_of_rules_and_failed_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    query = "SELECT tensor FROM losses JOIN statistics USING (step) WHERE tensor::INTEGER > 0"
    rules.write_text(
        "rules:\n"
        "  - {rule: non_finite_values, name: lost, dry_run: true, actions: [stop], for: {steps: 2}}\n"
        "  - {rule: stalled_training, for: {seconds: 60}}\n"
        f"  - {{rule: sql, name: mine, params: {{query: '{query}'}}}}\n"
    )
    with started(tmp_path / "runs", 4, "--rules", rules) as (process, told):
        assert told == [
            "rule lost, of rule non_finite_values (warning, after 2 steps, dry run)",
            "rule stalled_training (warning, after 60 s)",
            "rule mine, of rule sql (warning, after 1 step)",
            "may stop jobs: no rule",
        ]
        with Hook(tmp_path / "runs", run="well", project="vision") as hook:
            for _ in range(3):
                hook.log(loss=1.0)
                hook.step()
        assert process.stdout is not None
        assert line_of(process).startswith("watchstep: vision/well: rule mine cannot be evaluated: ")
        shown = run_command("runs", "alerts", "vision/well", "--store", tmp_path / "runs")
    assert shown.stdout.startswith("vision/well: no alert has fired\nerror: rule mine cannot be evaluated: ")


@pytest.mark.release
def test_serve_reports_an_empty_rule_file(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: []")
    with started(tmp_path / "runs", 2, "--rules", rules) as (_, told):
        assert told == [
            "the rule file has no rules: only rules of runs and projects are evaluated",
            "may stop jobs: no rule",
        ]


PRINT_SERVICE = "import os; print(os.environ['WATCHSTEP_SERVICE'], os.environ['WATCHSTEP_TOKEN'])"
