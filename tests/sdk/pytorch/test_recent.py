"""Figures of the last steps are kept in memory, and written when a failure or a stop asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.sdk.training import batches, recorded, watched_training
from watchstep import CaptureConfig, Hook, StopTraining, open_run
from watchstep.capture.steps.recent import RECENT_STEPS, RecentSteps
from watchstep.capture.steps.record import FinishedStep
from watchstep.capture.tensors.snapshots import StoredFile
from watchstep.format.control import ControlDocument, SnapshotRequest, StopRequest
from watchstep.reading.columns import Selection
from watchstep.reading.compaction import compact

STEP = 0.1
"""Seconds of a step of the program."""


class Clock:
    """Time passes when the program says so, and a little with each reading."""

    def __init__(self, reading: float) -> None:
        self.now = 0.0
        self._reading = reading

    def __call__(self) -> float:
        self.now += self._reading
        return self.now


def config(clock: Clock) -> CaptureConfig:
    """The budget pays for nothing after the first steps."""
    return CaptureConfig(clock=clock, overhead_budget=1e-9, allowance_seconds=0, probes=(), system=None)


def train(
    tmp_path: Path,
    steps: int,
    *,
    reading: float = 1e-4,
    change: Callable[[int, Hook, torch.Tensor], None] = lambda step, hook, x: None,
    clip: bool = False,
) -> Hook:
    """Train, and return the hook, which is still open."""
    clock = Clock(reading)
    hook, training = watched_training(tmp_path, config=config(clock), on_stop="raise")
    for step, (x, y) in enumerate(batches(steps)):
        change(step, hook, x)
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(training.model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
        training.optimizer.step()
        clock.now += STEP
    return hook


def steps_of(hook: Hook, name: str) -> list[int]:
    found: list[int] = recorded(hook).tensor(name).statistics()["step"].to_pylist()
    return found


def bad_at(bad: int) -> Callable[[int, Hook, torch.Tensor], None]:
    def change(step: int, hook: Hook, x: torch.Tensor) -> None:
        if step == bad:
            x[0, 0] = float("nan")

    return change


NAMES = ("0.weight:gradient", "0.weight", "0.bias:gradient", "0.bias")


def test_a_failure_has_the_steps_before_it(tmp_path: Path) -> None:
    hook = train(tmp_path, 72, change=bad_at(70))
    for name in NAMES:
        steps = steps_of(hook, name)
        assert {0, 1, 2, *range(70 - RECENT_STEPS, 72)} <= set(steps)
        assert len(steps) <= RECENT_STEPS + 10


def test_a_healthy_training_writes_none_of_them(tmp_path: Path) -> None:
    hook = train(tmp_path, 30)
    assert steps_of(hook, "0.weight:gradient") == [0, 1, 2]
    assert "flights" not in hook.health["counts"]


@pytest.mark.parametrize("clip", [False, True])
def test_they_are_what_a_complete_recording_has(tmp_path: Path, clip: bool) -> None:
    """Before clipping, as the rows of a step in which something is due."""
    kept = recorded(train(tmp_path / "kept", 14, change=bad_at(12), clip=clip))
    whole, training = watched_training(
        tmp_path / "whole", config=CaptureConfig(overhead_budget=None, probes=(), system=None)
    )
    for step, (x, y) in enumerate(batches(14)):
        bad_at(12)(step, whole, x)
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(training.model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
        training.optimizer.step()
    complete = recorded(whole)
    for name in NAMES:
        rows, expected = (run.tensor(name).statistics() for run in (kept, complete))
        assert rows["step"].to_pylist() == expected["step"].to_pylist() == list(range(14))
        for column in ("count", "nan", "zero", "min", "max", "mean", "std", "l2", "abs_max", "time_ns"):
            numbers = rows[column].to_pylist()[:12]
            if column == "time_ns":
                assert numbers == sorted(numbers)
            else:
                assert numbers == pytest.approx(expected[column].to_pylist()[:12])


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python since 3.12 does once a program ends, and a system with a limit of threads always."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr("threading._start_new_thread", refuse)
    monkeypatch.setattr("threading._start_joinable_thread", refuse, raising=False)


def test_a_failure_is_written_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = train(tmp_path, 20)
    refuse_threads(monkeypatch)
    with pytest.raises(ValueError, match="of the program"), hook:
        raise ValueError("of the program")
    monkeypatch.undo()
    run = open_run(hook.run_url)
    assert run.ends()[0].state == "failed"
    assert run.tensor("loss").statistics()["step"].to_pylist() == list(range(20))


def test_a_tensor_has_one_row_where_two_optimizers_share_it(tmp_path: Path) -> None:
    clock = Clock(1e-4)
    hook, training = watched_training(tmp_path, config=config(clock))
    shared = [training.model.get_parameter("0.weight"), training.model.get_parameter("3.weight")]
    second = torch.optim.SGD(shared, lr=0.01)
    for step, (x, y) in enumerate(batches(14)):
        bad_at(12)(step, hook, x)
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(training.model(x), y).backward()
        second.step()
        training.optimizer.step()
        clock.now += STEP
    run = recorded(hook)
    for name in NAMES:
        rows = run.tensor(name).statistics().to_pydict()
        assert rows["step"] == list(range(14))
        assert len(set(rows["count"][:12])) == 1


def test_a_tensor_has_one_row_where_a_later_update_of_the_step_is_bad(tmp_path: Path) -> None:
    clock = Clock(1e-4)
    hook, training = watched_training(tmp_path, config=config(clock))
    bias = training.model.get_parameter("3.bias")
    critic = torch.optim.SGD([bias], lr=0.01)
    bad: list[int] = []
    for x, y in batches(14):
        for update in range(2):
            training.optimizer.zero_grad()
            nn.functional.cross_entropy(training.model(x), y).backward()
            if len(bad) == 8 and update and bias.grad is not None:
                bias.grad[0] = float("nan")
            critic.step()
            bias.data.nan_to_num_()
        bad.append(len(bad))
        training.optimizer.step()
        clock.now += STEP
    steps = steps_of(hook, "3.bias:gradient")
    assert {7, 8, 9} <= set(steps)
    assert len(set(steps)) == len(steps)


def test_a_stop_asks_for_them(tmp_path: Path) -> None:
    hooks: list[Hook] = []

    def stop(step: int, hook: Hook, x: torch.Tensor) -> None:
        if step == 20:
            hooks.append(hook)
            hook._control_changed(ControlDocument().with_stop(StopRequest("a1", 0, "by test")), "a1")

    with pytest.raises(StopTraining):
        train(tmp_path, 30, change=stop)
    assert steps_of(hooks[0], "0.weight:gradient") == list(range(21))


def test_a_request_of_the_service_asks_for_them(tmp_path: Path) -> None:
    def request(step: int, hook: Hook, x: torch.Tensor) -> None:
        if step == 20:
            document = ControlDocument().with_snapshot(SnapshotRequest("s1", 0, "a1"))
            hook._control_changed(document, "a1")

    hook = train(tmp_path, 24, change=request)
    assert set(steps_of(hook, "0.weight:gradient")) >= set(range(20))


def test_an_exception_of_the_program_asks_for_them(tmp_path: Path) -> None:
    hook = train(tmp_path, 20)
    with pytest.raises(ValueError, match="of the program"), hook:
        raise ValueError("of the program")
    assert steps_of(hook, "0.weight:gradient") == list(range(20))


def test_rules_and_compaction_leave_them_out(tmp_path: Path) -> None:
    hook = train(tmp_path, 14, change=bad_at(12))
    run = recorded(hook)
    name, whole = "0.weight:gradient", list(range(14))
    judged = run.index.judged()
    selection = Selection(("mean",), frozenset([name]))
    assert sorted(set(judged.collect(selection)["step"].tolist())) == [0, 1, 2, 12, 13]
    compact(hook.run_url)
    again = open_run(hook.run_url)
    assert again.tensor(name).statistics()["step"].to_pylist() == whole
    judged = again.index.judged()
    assert sorted(set(judged.collect(selection)["step"].tolist())) == [0, 1, 2, 12, 13]


def test_where_measuring_is_too_expensive_nothing_is_kept(tmp_path: Path) -> None:
    hook = train(tmp_path, 40, reading=0.005, change=bad_at(38))
    assert len(steps_of(hook, "0.weight:gradient")) <= 12


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinishedStep, "bytes", property(lambda self: 2**20))
    written: list[StoredFile] = []
    recent = RecentSteps(3, lambda: STEP, written.append)
    for step in range(40):
        recent.add(FinishedStep(step, ()))
    recent.write(40)
    recent.write(41)
    assert [file.key("a1") for file in written] == ["flights/a1/3/24-39.arrow"]


def test_few_objects_wait_for_the_store() -> None:
    """A training may have series of non-finite steps for as long as the store is away."""
    written: list[StoredFile] = []
    recent = RecentSteps(3, lambda: STEP, written.append)
    for step in range(100):
        recent.add(FinishedStep(step, ()))
        recent.write(step)
    assert len(written) < 10
    for file in written:
        assert callable(file.data)
        file.data()  # the store has answered
    recent.write(100)
    assert written[-1].key("a1").endswith("-99.arrow")


def test_the_interval_follows_the_cost() -> None:
    recent = RecentSteps(0, lambda: STEP, lambda file: None)
    measured = []
    for step in range(300):
        if recent.wants(step):
            measured.append(step)
            recent.spent(step, 0.0007 if step < 100 else 0.01)
    assert measured[:3] == [3, 4, 5]
    assert measured[3:33] == list(range(6, 96, 3))  # 0.3 % of a step pays for a third of them
    assert len([step for step in measured if step >= 120]) <= 6  # it is tried again after a hundred steps
