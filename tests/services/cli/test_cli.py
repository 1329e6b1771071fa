"""The commands, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from watchstep import Hook
from watchstep_rules.defaults import DEFAULT_RULES

WATCHSTEP = Path(sys.executable).with_name("watchstep")


def watchstep(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [WATCHSTEP, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
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


def test_list(store: Path) -> None:
    done = watchstep("runs", "list", "--store", store)
    assert done.returncode == 0
    assert "vision" in done.stdout
    assert "completed" in done.stdout


@pytest.mark.parametrize("name", ["night", "vision/night", "{store}/vision/night"])
def test_show(store: Path, name: str) -> None:
    done = watchstep("runs", "show", name.format(store=store), "--store", store)
    assert done.returncode == 0, done.stderr
    assert "0 to 29 (30 recorded)" in done.stdout
    assert "3 at first, 0.1 at last" in done.stdout


def test_stats(store: Path) -> None:
    done = watchstep("runs", "stats", "night", "loss", "--store", store, "--last", "2")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["STEP", "28", "29"]


def test_rules() -> None:
    assert "nan_or_inf" in watchstep("rules", "list").stdout
    shown = watchstep("rules", "show", "vanishing_gradient").stdout
    assert "threshold" in shown
    assert "1e-07" in shown


def test_version() -> None:
    assert watchstep("--version").stdout.strip() == "0.1.0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs", "show", "nope"], "run 'nope'"),
        (["runs", "show", "../night"], "name '..' cannot be used"),
        (["runs", "stats", "night", "nope"], "tensor 'nope'"),
        (["runs", "list", "--store", "/no/such/folder"], "no such folder"),
        (["rules", "show", "nope"], "unknown rule 'nope'"),
        (["serve", "--rules", "/no/rules.yaml"], "rule file /no/rules.yaml"),
        (["serve", "--store", "/dev/null/x"], "/dev/null/x"),
        (["serve", "--host", "999.0.0.1"], "999.0.0.1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_told_in_two_lines(store: Path, arguments: list[str], says: str) -> None:
    extra = [] if "--store" in arguments or arguments[0] == "rules" else ["--store", str(store)]
    done = watchstep(*arguments, *extra)
    assert done.returncode == 2
    assert says in done.stderr
    assert "mend: " in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def serving(store: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [WATCHSTEP, "serve", "--store", store, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**plain_environment(), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        told = [process.stdout.readline() for _ in range(len(DEFAULT_RULES) + 2)]
        assert "watching" in told[0]
        assert "rule nan_or_inf (critical, after 1 steps, stops the job)" in told[1]
        assert "http://127.0.0.1:" in told[-1]
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stdout.close()


def test_serve_is_found_by_run_and_ends_clean(tmp_path: Path) -> None:
    with serving(tmp_path):
        note = json.loads((tmp_path / ".watchstep" / "service.json").read_text())
        assert (tmp_path / ".watchstep" / "service.json").stat().st_mode & 0o777 == 0o600
        done = watchstep("run", "--store", tmp_path, "--run", "r", "--", sys.executable, "-c", PRINT_SERVICE)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [note["url"], note["recorder_token"]]
    assert not (tmp_path / ".watchstep" / "service.json").exists()


PRINT_SERVICE = "import os; print(os.environ['WATCHSTEP_SERVICE'], os.environ['WATCHSTEP_TOKEN'])"


def test_two_services_in_one_home_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path):
        done = watchstep("serve", "--store", tmp_path, "--port", "0")
        assert done.returncode == 2
        assert "another watchstep service runs there" in done.stderr
