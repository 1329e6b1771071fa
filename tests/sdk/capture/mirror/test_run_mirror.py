"""The mirror during a run, and its settings: other tools have no effect on training or on what is recorded."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.event_files import accumulated
from tests.sdk.training import EVERY_STEP, recorded, watched_training
from tests.services.jobs import eventually
from watchstep import Bounds, Hook, Mirror, StopTraining, open_run
from watchstep.capture.mirror import active_runs, run_mirror
from watchstep.capture.mirror.active_runs import is_mirrored_by
from watchstep.capture.mirror.mirrored_run import AlertChange, MirroredPoint, OtherRun, RunLinks
from watchstep.capture.mirror.settings import DEFAULT_SERIES, MirrorTarget, mirror_of
from watchstep.errors import ConfigError

FAST = replace(EVERY_STEP, bounds=Bounds(flush_seconds=0.01))


@dataclass
class Other:
    """A run of another tool in memory.

    Attributes:
        answering: set while it answers.
        error: what its methods raise.
        is_over: whether the program has finished it.
    """

    answering: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    is_over: bool = False
    identity: OtherRun = field(default_factory=lambda: OtherRun("7", "https://other.test/7"))
    links: list[RunLinks] = field(default_factory=list)
    alerts: list[AlertChange] = field(default_factory=list)
    points: list[MirroredPoint] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)

    def _answer(self) -> None:
        assert self.answering.wait(60)
        if self.error is not None:
            raise self.error

    def link(self, links: RunLinks) -> None:
        self._answer()
        self.links.append(links)

    def alert(self, change: AlertChange) -> None:
        self._answer()
        self.alerts.append(change)

    def write(self, points: Sequence[MirroredPoint]) -> int:
        self._answer()
        self.points.extend(points)
        return 0

    def close(self, *, is_stopped: bool) -> int:
        self.closed.append(is_stopped)
        return 0

    def series(self, name: str) -> dict[int, float]:
        return {point.step: point.values[name] for point in self.points if name in point.values}


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Other:
    """The run that ``mirror="mlflow"`` finds."""
    other = Other()
    other.answering.set()
    monkeypatch.setitem(active_runs._ACTIVE, "mlflow", lambda: other)
    monkeypatch.setattr(run_mirror, "connect", connected)
    return other


def connected(target: MirrorTarget, active: Any) -> Any:
    return active if isinstance(active, Other) else active_runs.connect(target, active)


def log_steps(hook: Hook, steps: range) -> None:
    for step in steps:
        hook.log(loss=float(step))
        hook.step()


def mirrored(tmp_path: Path, steps: range, **options: Any) -> Hook:
    """A closed hook with some losses, mirrored into the active run."""
    hook = Hook(tmp_path, **{"config": FAST, "mirror": "mlflow", **options})
    log_steps(hook, steps)
    hook.close()
    return hook


def test_a_run_is_mirrored_with_links_both_ways(tmp_path: Path, other: Other) -> None:
    hook = Hook(tmp_path, run="r", config=FAST, mirror="mlflow")
    log_steps(hook, range(20))
    eventually(lambda: 10 in other.series("watchstep/train/loss"))
    hook.close()
    assert hook.health["faults"] == {}
    assert other.series("watchstep/train/loss") == {step: float(step) for step in range(20)}
    assert other.links == [RunLinks("default", "r", f"{tmp_path.as_uri()}/default/r")]
    assert other.closed == [False]
    state = {"state": "ended", "id": "7", "url": "https://other.test/7", "points": 20}
    assert hook.health["mirror"] == {"mlflow": state}
    (end,) = open_run(hook.run_url).ends()
    assert end.health["mirror"]["mlflow"]["url"] == "https://other.test/7"


@pytest.mark.ci
def test_alerts_of_the_guard_and_its_stop_are_mirrored(tmp_path: Path, other: Other) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - rule: nan_or_inf\n    severity: critical\n    actions: [stop]\n")
    hook, training = watched_training(tmp_path / "store", config=FAST, guard=rules, mirror="mlflow")

    def damage(step: int, _: Any) -> None:
        if step == 5:
            next(training.model.parameters()).data[0, 0] = float("nan")

    with pytest.raises(StopTraining):
        training.run(20, damage)
    hook.close()
    assert [(change.name, change.phase, change.severity, change.step) for change in other.alerts] == [
        ("nan_or_inf", "firing", "critical", 6),
        ("stop", "firing", "critical", 6),
    ]
    assert "NaN" in other.alerts[0].message
    assert other.series("watchstep/alerts/nan_or_inf") == {6: 1.0}
    assert other.closed == [True]
    assert other.series("watchstep/train/loss").keys() == set(range(7))


def test_an_alert_that_resolves_is_mirrored(tmp_path: Path, other: Other) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - rule: non_finite_values\n    keep_firing: {steps: 2}\n")
    hook = Hook(tmp_path / "store", config=FAST, guard=rules, mirror="mlflow")
    for step in range(60):
        hook.log(loss=math.nan if 10 <= step < 20 else 1.0)
        hook.step()
    hook.close()
    assert [change.phase for change in other.alerts] == ["firing", "resolved"]
    assert other.alerts[0].step == 10
    assert list(other.series("watchstep/alerts/non_finite_values").values()) == [1.0, 0.0]


def test_losses_are_those_of_an_unmirrored_training(tmp_path: Path, other: Other) -> None:
    losses = []
    for mirror in (None, "mlflow"):
        hook, training = watched_training(tmp_path / str(mirror), run="r", mirror=mirror)
        losses.append(training.run(20))
        recorded(hook)
    assert losses[0] == losses[1]
    assert len(other.series("watchstep/train/gradients/l2")) == 20


def test_without_an_active_run_nothing_is_made(tmp_path: Path) -> None:
    hook = mirrored(tmp_path / "store", range(5), mirror=["wandb", "mlflow", "trackio"])
    assert hook.health["faults"] == {}
    assert hook.health["notes"] == {
        f"mirror {tool}": f"the program had no active run of {tool}: nothing was mirrored"
        for tool in ("wandb", "mlflow", "trackio")
    }
    assert {state["state"] for state in hook.health["mirror"].values()} == {"waiting"}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_run_that_begins_later_gets_the_earlier_steps(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    active: list[Other] = []
    monkeypatch.setitem(active_runs._ACTIVE, "mlflow", lambda: active[0] if active else None)
    hook = Hook(tmp_path, config=FAST, mirror="mlflow")
    log_steps(hook, range(10))
    active.append(other)
    log_steps(hook, range(10, 20))
    hook.close()
    assert other.series("watchstep/train/loss").keys() == set(range(20))


def test_a_tool_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path, other: Other) -> None:
    other.error = ConnectionError("server is away")
    hook = Hook(tmp_path / "store", config=FAST, mirror=["mlflow", f"tensorboard:{tmp_path / 'live'}"])
    log_steps(hook, range(10))
    eventually(lambda: bool(hook.health["faults"]))
    log_steps(hook, range(10, 20))
    hook.close()
    assert hook.health["faults"] == {"mirror mlflow": "ConnectionError: server is away"}
    assert hook.health["counts"]["faults"] == 1
    assert hook.health["mirror"]["mlflow"]["state"] == "failed"
    events = accumulated(tmp_path / "live" / "watchstep").Scalars("watchstep/train/loss")
    assert [(event.step, event.value) for event in events] == [(step, float(step)) for step in range(20)]
    assert open_run(hook.run_url).steps() == list(range(20))


def test_a_run_that_the_program_finishes_first_is_no_fault(tmp_path: Path, other: Other) -> None:
    hook = Hook(tmp_path, config=FAST, mirror="mlflow")
    log_steps(hook, range(10))
    eventually(lambda: bool(other.points))
    other.is_over, other.error = True, RuntimeError("finished")
    log_steps(hook, range(10, 20))
    hook.close()
    assert hook.health["faults"] == {}
    assert "close the hook first" in hook.health["notes"]["mirror mlflow"]
    assert hook.health["mirror"]["mlflow"]["state"] == "ended"


def test_a_tool_that_does_not_answer_delays_nothing(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_mirror, "_CLOSE_SECONDS", 0.3)
    other.answering.clear()
    hook = Hook(tmp_path, config=FAST, mirror="mlflow")
    log_steps(hook, range(20))
    eventually(lambda: hook.health["counts"].get("rows") == 20)
    hook.close()
    assert "TimeoutError" in hook.health["faults"]["mirror"]
    assert [end.state for end in open_run(hook.run_url).ends()] == ["completed"]
    other.answering.set()


def test_what_waits_is_bounded(tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_mirror, "_MAX_ROWS", 30)
    other.answering.clear()
    hook = Hook(tmp_path, config=FAST, mirror="mlflow")
    log_steps(hook, range(20))
    eventually(lambda: hook.health["counts"].get("rows") == 20)
    log_steps(hook, range(20, 100))
    eventually(lambda: hook.health["counts"].get("dropped_mirror_rows", 0) > 0)
    other.answering.set()
    hook.close()
    dropped = hook.health["counts"]["dropped_mirror_rows"]
    assert len(other.series("watchstep/train/loss")) == 100 - dropped
    assert open_run(hook.run_url).steps() == list(range(100))


def test_the_series_are_chosen(tmp_path: Path, other: Other) -> None:
    hook = Hook(tmp_path, config=FAST, mirror=Mirror("mlflow", series=["metrics"]))
    for step in range(5):
        hook.log(loss=1.0, accuracy=step / 5)
        hook.step()
    hook.close()
    assert {name for point in other.points for name in point.values} == {"watchstep/train/accuracy"}


@contextmanager
def variables(monkeypatch: pytest.MonkeyPatch, **values: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def test_other_ranks_mirror_into_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("wandb", "mlflow", "trackio"):
        assert is_mirrored_by(MirrorTarget(tool), 0)
        assert is_mirrored_by(MirrorTarget(tool), 3)
    with variables(monkeypatch, MLFLOW_RUN_ID="7", WANDB_RUN_ID="7"):
        assert not is_mirrored_by(MirrorTarget("mlflow"), 3)
        assert not is_mirrored_by(MirrorTarget("wandb"), 3)
        assert is_mirrored_by(MirrorTarget("wandb"), 0)
    assert not is_mirrored_by(MirrorTarget("tensorboard", "x"), 3)


def test_event_files_have_texts_and_a_folder_of_their_own(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "live")) as writer:
        hook = Hook(tmp_path / "store", run="r", config=FAST, guard=True, mirror=writer)
        for step in range(40):
            writer.add_scalar("loss", 1.0 / (step + 1), step)
            hook.log({"loss": 1.0 / (step + 1)})
            hook.log(loss=float(step % 30), mode="eval")
            hook.step()
        hook.close()
    assert [event.step for event in accumulated(tmp_path / "live").Scalars("loss")] == list(range(40))
    mirrored = accumulated(tmp_path / "live" / "watchstep")
    assert set(mirrored.Tags()["scalars"]) >= {"watchstep/train/loss", "watchstep/eval/loss"}
    (link,) = mirrored.Tensors("watchstep/run/text_summary")
    (text,) = link.tensor_proto.string_val
    assert f"**url**: {hook.run_url}" in text.decode()
    assert mirrored.PluginTagToContent("text").keys() >= {"watchstep/run/text_summary"}


def tools(given: Any) -> list[tuple[str, str]]:
    mirror = mirror_of(given)
    assert mirror is not None
    return [(target.tool, target.folder) for target in mirror.targets]


def test_tools_are_named_by_text_and_lists() -> None:
    assert tools("wandb") == [("wandb", "")]
    assert tools("wandb, tensorboard:a,b/c,mlflow") == [
        ("wandb", ""),
        ("tensorboard", "a,b/c"),
        ("mlflow", ""),
    ]
    assert tools(["trackio", "tensorboard:runs/a"]) == [("trackio", ""), ("tensorboard", "runs/a")]
    mirror = mirror_of("wandb:rows")
    assert mirror is not None
    assert mirror.targets == (MirrorTarget("wandb", has_own_rows=True),)
    assert mirror.series == DEFAULT_SERIES


def test_a_summary_writer_names_its_folder(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        assert tools(writer) == [("tensorboard", str(tmp_path))]
        assert tools(["mlflow", writer]) == [("mlflow", ""), ("tensorboard", str(tmp_path))]


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mirror_of(None) is None
    monkeypatch.setenv("WATCHSTEP_MIRROR", "mlflow,trackio")
    monkeypatch.setenv("WATCHSTEP_MIRROR_SERIES", "metrics, weights/rms")
    mirror = mirror_of(None)
    assert mirror is not None
    assert [target.tool for target in mirror.targets] == ["mlflow", "trackio"]
    assert mirror.series == ("metrics", "weights/rms")
    assert tools("wandb") == [("wandb", "")]
    given = Mirror("wandb", series=["losses"])
    assert mirror_of(given) is given
    assert mirror_of([]) is None


@pytest.mark.parametrize(
    "mirror",
    [
        "wandbb",
        "",
        "tensorboard",
        "tensorboard:",
        "tensorboard:s3://b/c",
        "mlflow:x",
        5,
        ["wandb", "wandb"],
        [3],
    ],
)
def test_what_names_no_tool_is_refused(tmp_path: Path, mirror: Any) -> None:
    with pytest.raises(ConfigError, match="mirror"):
        Hook(tmp_path / "store", mirror=mirror)
    assert not (tmp_path / "store").exists()


def test_an_invalid_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_MIRROR", "tensorboard")
    with pytest.raises(ConfigError, match="SummaryWriter"):
        Hook(tmp_path / "store")


@pytest.mark.parametrize("series", ["losses", ["loss"], ["gradients/l3"], ["/l2"], [5], 5])
def test_what_names_no_series_is_refused(series: Any) -> None:
    with pytest.raises(ConfigError, match="series"):
        Mirror("wandb", series=series)
