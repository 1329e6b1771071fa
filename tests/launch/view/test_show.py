"""What is shown of runs and jobs, in words and in pictures."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from tests.launch.view.conftest import judge
from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording
from watchstep.client import Client, Event
from watchstep.errors import ServiceError
from watchstep_launch.view.console import notebook_data
from watchstep_launch.view.picture import fewer, line_of_bars, picture, span
from watchstep_launch.view.run_status import POINTS, Loss, RunStatus, RunWatcher, line_of, words_of
from watchstep_launch.view.show import QUIET, Showing, kind_of
from watchstep_services.cli.jobs import app
from watchstep_services.db.models import RunRow

RUN = {"project": "default", "run": "night"}
STATUS = RunStatus(
    "default/night",
    "stopped",
    628,
    None,
    44.0,
    (Loss("loss", (1.0, 0.5, 0.25, 0.2, None)), Loss("[bold]aux", ())),
    {"nan_or_inf": "firing", "dead_relu": "inactive", "overfit": "no data"},
    (
        Event("1", "io.watchstep.stop.requested", "", "never", {**RUN, "reason": "NaN in loss"}, {}),
        Event("2", "io.watchstep.run.ended", "", "never", {**RUN, "state": "stopped", "last_step": 628}, {}),
    ),
    (0.0447, 0.01),
    ("1,200 rows dropped",),
    "http://127.0.0.1:9: no answer",
)


@pytest.fixture(autouse=True)
def _nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", QUIET):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error is a terminal meanwhile; gives the other end of it. Not a fixture: pytest sets its own for each phase."""
    other, own = os.openpty()
    with os.fdopen(own, "w", encoding="utf-8") as written, monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", written)
        changed.setenv("TERM", "xterm")
        yield other
    os.close(other)


def test_lines_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert kind_of(None) == "lines"
    assert kind_of(True) == "terminal"


def test_a_picture_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch):
        assert (kind_of(None), kind_of(False)) == ("terminal", "lines")
        for name, value, kind in (
            ("CI", "true", "lines"),
            (QUIET, "1", "lines"),
            ("TERM", "dumb", "lines"),
            ("CI", "false", "terminal"),
        ):
            with monkeypatch.context() as said:
                said.setenv(name, value)
                assert kind_of(None) == kind


def test_a_line_for_each_event_and_each_once(
    ended: tuple[Driven, Recording, Client], capsys: pytest.CaptureFixture[str]
) -> None:
    driven, recording, client = ended
    watcher = RunWatcher(lambda: client, PROJECT, "run-1")
    with Showing(watcher, "lines") as showing:
        showing.turn()
        showing.turn()  # too soon to look again
        seen = capsys.readouterr().err
        recording.write(2, 20, 29)
        recording.write(3, 30, 39)
        judge(driven, 1)
        showing.turn(last=True)
    lines = [line.partition(" ")[2] for line in (seen + capsys.readouterr().err).splitlines()]
    assert lines == [f"vision/run-1: {words_of(event)}" for event in client.events("run-1")]
    assert any(
        line.startswith("vision/run-1: non_finite_values (critical) firing: bad from step 15: ")
        for line in lines
    )
    assert seen


def test_what_is_seen_of_a_run(ended: tuple[Driven, Recording, Client]) -> None:
    driven, _, client = ended
    now = [1000.0]
    watcher = RunWatcher(lambda: client, PROJECT, "run-1", clock=lambda: now[0])
    watcher.poll()
    status = watcher.status
    assert (status.name, status.state, status.step) == ("vision/run-1", "running", 19)
    assert [(loss.name, loss.points[0], loss.points[-1]) for loss in status.losses] == [("loss", 1.0, None)]
    assert status.rules == {"non_finite_values": "firing", "exploding_gradient": "inactive"}
    assert status.steps_per_second is None
    now[0] += 10
    with driven.service.database.write() as session:
        session.get_one(RunRow, 1).last_step = 119
    watcher.poll()
    assert watcher.status.steps_per_second == 10.0


def test_a_service_that_is_away_takes_nothing_from_what_was_seen(
    ended: tuple[Driven, Recording, Client],
) -> None:
    _, _, client = ended
    away = Client("http://127.0.0.1:9", "", PROJECT)
    clients = [client, away]
    watcher = RunWatcher(lambda: clients.pop(0), PROJECT, "run-1")
    watcher.poll()
    watcher._connected = away
    assert watcher.poll() == []
    assert (watcher.status.step, "does not respond" in watcher.status.trouble) == (19, True)
    assert RunWatcher(lambda: client, PROJECT, "never").poll() == []


def test_a_terminal_is_drawn_anew(
    ended: tuple[Driven, Recording, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, client = ended
    with terminal(monkeypatch) as other:
        with Showing(RunWatcher(lambda: client, PROJECT, "run-1"), "terminal") as showing:
            showing.turn("job local:7 running")
            showing.turn("job local:7 ended", last=True)
        sys.stderr.flush()
        shown = ""
        while "job local:7 ended" not in shown:  # a terminal hands on what it has, piece by piece
            shown += os.read(other, 65_536).decode(errors="replace")
    assert "job local:7 running" in shown
    assert "\x1b[1A" in shown  # one picture over the other
    assert shown.rstrip().rpartition("job local:7")[2].startswith(" ended")


def test_the_command_shows_it_to_its_end(
    ended: tuple[Driven, Recording, Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, _, client = ended
    with driven.service.database.write() as session:
        session.get_one(RunRow, 1).state = "failed"
    monkeypatch.setenv("WATCHSTEP_TOKEN", client._transport.address.token)
    words = ["watch", "vision/run-1", "--service", client._transport.address.url, "--lines"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "vision/run-1: non_finite_values (critical) firing: bad from step 15" in done.stderr
    done = CliRunner().invoke(app, [*words[:-1], "--json"], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        event.raw for event in client.events("run-1")
    ]
    with pytest.raises(ServiceError, match="no service runs"):
        CliRunner().invoke(app, ["watch", "x", "--store", str(tmp_path)], catch_exceptions=False)


def text_of(status: RunStatus, job: str = "", width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True, highlight=False)
    console.print(picture(status, job))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_all_that_there_is_to_see() -> None:
    assert text_of(STATUS, "job local:7 ended with exit code 86") == [
        "default/night  stopped after 44 s  job local:7 ended with exit code 86",
        "step              628",
        "loss       not finite  █▃▁▁\N{MULTIPLICATION SIGN}",
        "[bold]aux           -",
        "recording       4.47%  of the program's time; budget 1.0%",
        "problems               1,200 rows dropped",
        "rules  1 firing, 1 inactive, 1 no data",
        "  ● nan_or_inf  firing",
        "never  stop requested: NaN in loss",
        "never  stopped, ended after step 628",
        "no answer from the service: http://127.0.0.1:9: no answer",
    ]


def test_before_anything_is_known() -> None:
    assert text_of(RunStatus("default/night"), "job slurm:7 queued") == [
        "default/night  waiting  job slurm:7 queued",
        "step  -",
    ]


def test_what_does_not_fit_goes_on_below_and_nothing_is_cut_off() -> None:
    reason = "rule nan_or_inf: bad from step 600: 32 NaN among 32 elements of 1:output"
    event = Event("1", "io.watchstep.stop.requested", "", "never", {**RUN, "reason": reason}, {})
    narrow = text_of(
        RunStatus("default/20261122-121517-a8c3ce", "running", events=(event,)), "job slurm:7 queued", 40
    )
    assert narrow == [
        "default/20261122-121517-a8c3ce  running",
        "for 0 s  job slurm:7 queued",
        "step  -",
        "never  stop requested: rule nan_or_inf:",
        "       bad from step 600: 32 NaN among",
        "       32 elements of 1:output",
    ]


def test_figures_are_whole_where_there_is_little_room() -> None:
    loss = Loss("train_loss", tuple(float(value) for value in range(POINTS)))
    status = RunStatus("a/b", "running", 123_456, 7.0, losses=(loss,), overhead=(0.01, 0.01))
    assert text_of(status, width=40)[1:] == [
        "step        123,456  7 steps/s",
        "train_loss       39  ▁▁▁▂▂▃▃▃▄▄▅▅▆▆▇▇███",
        "recording     1.00%  of the program's",
        "                     time; budget 1.0%",
    ]


def test_the_pace_is_of_what_goes_on() -> None:
    running, ended = (
        text_of(RunStatus("a/b", state, 7, steps_per_second=20.0)) for state in ("running", "completed")
    )
    assert (running[1].split(), ended[1].split()) == (["step", "7", "20", "steps/s"], ["step", "7"])


def test_many_rules_are_counted() -> None:
    many = RunStatus("a/b", "running", rules={f"rule-{number}": "pending" for number in range(20)})
    assert text_of(many)[-1] == "  and 12 more"


@pytest.mark.ci
@given(st.text(max_size=40), st.text(max_size=40), st.integers(20, 120))
def test_nothing_of_a_programs_own_is_markup_or_moves_the_cursor(name: str, reason: str, width: int) -> None:
    event = Event("1", "io.watchstep.stop.requested", "", "now", {**RUN, "reason": reason}, {})
    odd = RunStatus(name, "running", losses=(Loss(name, (1.0,)),), rules={name: "firing"}, events=(event,))
    for line in (*text_of(odd, reason, width), line_of(event)):
        assert line.isprintable()


@given(st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=POINTS))
def test_a_line_of_bars_has_one_for_each_point(points: list[float | None]) -> None:
    drawn = line_of_bars(points)
    assert len(drawn) == len(points)
    assert set(drawn) <= set("▁▂▃▄▅▆▇█\N{MULTIPLICATION SIGN}")


@given(
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=POINTS),
    st.integers(1, POINTS),
)
def test_fewer_bars_tell_of_all_points(points: list[float | None], most: int) -> None:
    drawn = fewer(points, most)
    assert len(drawn) == min(len(points), most)
    assert (None in drawn) == (None in points)
    finite = [value for value in points if value is not None]
    slack = 1e-300 + 1e-9 * max((abs(value) for value in finite), default=0.0)
    assert all(value is None or min(finite) - slack <= value <= max(finite) + slack for value in drawn)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59.9, "59 s"), (3600, "1 h"), (3661, "1 h 1 min"), (200_000, "2 d 7 h")],
)
def test_a_span_has_two_units(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_a_notebook_gets_colours_and_plain_text() -> None:
    reason = "of many words " * 20
    event = Event("1", "io.watchstep.stop.requested", "", "never", {**RUN, "reason": reason}, {})
    data = notebook_data(picture(RunStatus("a<b/night", "running", events=(event,))))
    assert data["text/html"].startswith("<pre style='font-family")
    assert "a&lt;b/night" in data["text/html"]
    assert data["text/html"].count("<div ") == data["text/html"].count("</div>") == 3  # the browser folds
    assert data["text/plain"].startswith("a<b/night  running for 0 s")
    assert max(len(line) for line in data["text/plain"].splitlines()) <= 100


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("run.started", {"attempt": "a1"}, "started, attempt a1"),
        ("run.ended", {"state": "failed", "last_step": 3}, "failed, ended after step 3"),
        ("alert.firing", {"explanation": {"title": "r (warning) firing: bad from step 4", "seen": "16 NaN"}, "message": ""},
         "r (warning) firing: bad from step 4: 16 NaN"),
        ("alert.firing", {"name": "r", "step": 4, "message": "look", "inhibited_by": "q", "dry_run": True},
         "r firing at step 4: look; kept quiet by q (dry run)"),
        ("alert.resolved", {"explanation": {"title": "r (warning) resolved at step 9"}}, "r (warning) resolved at step 9"),
        ("stop.done", {"detail": "job local:7 is gone", "last_good_checkpoint": "c.pt"},
         "job local:7 is gone; last good checkpoint c.pt"),
        ("stop.would_have", {"reason": "NaN"}, "would have been stopped: NaN"),
        ("rule.no_data", {"name": "r", "step": 9}, "rule r has evaluated nothing up to step 9: it has no data"),
        ("store.became_slow", {}, "store became slow"),
    ],
)  # fmt: skip
def test_an_event_is_a_line(kind: str, data: dict[str, object], said: str) -> None:
    event = Event("1", f"io.watchstep.{kind}", "s", "2026-11-22T05:19:32Z", {**RUN, **data}, {})
    assert line_of(event)[8:] == f" default/night: {said}"
