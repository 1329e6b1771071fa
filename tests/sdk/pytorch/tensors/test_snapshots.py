"""Snapshots of weights and gradients when the gate hits and on request, within their limits, beside full tensors on a cadence."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.sdk.training import Training, batches, closure_of, small_model, watched_training, with_sgd
from watchstep import Cadence, CaptureConfig, Collection, Hook, Run, Snapshots, TensorLimits, open_run
from watchstep.capture.config import ADAPTIVE
from watchstep.errors import NotFoundError
from watchstep.format.control import ControlDocument, SnapshotRequest, StopRequest
from watchstep.format.snapshot import Snapshot


def hook_with(place: Path, **options: Any) -> Hook:
    return Hook(place, run="r", config=CaptureConfig(collections={}, snapshots=Snapshots(**options)))


def sgd(place: Path, **options: Any) -> tuple[Hook, Training]:
    """A training whose snapshots have these limits."""
    training = Training(*with_sgd(small_model()))
    config = CaptureConfig(collections={}, snapshots=Snapshots(**options))
    return watched_training(place, training, run="r", config=config)


def with_rings(place: Path) -> tuple[Hook, Training]:
    """A training of which the last weights, biases and gradients are saved, beside snapshots: each object has 1,000 to 2,000 bytes."""
    saved = Collection(None, tensors=Cadence(1), tensor_limits=TensorLimits(ring_bytes=1_500))
    config = CaptureConfig(collections=dict.fromkeys(("weights", "biases", "gradients"), saved))
    return watched_training(place, Training(*with_sgd(small_model())), run="r", config=config)


def steps_of(run: Run, collection: str = "") -> list[int]:
    """Steps with an object of a collection; of a snapshot by default."""
    return [key.step for key in run.snapshots() if key.collection == collection]


def finished(hook: Hook) -> Run:
    hook.close()
    assert hook.health["faults"] == {}
    return open_run(hook.run_url)


def only(run: Run) -> Snapshot:
    (key,) = run.snapshots()
    return run.open_snapshot(key)


def train(
    training: Training, steps: int, bad: Container[int] = (), each: Callable[[int], None] | None = None
) -> None:
    """As `Training.run`, with a NaN in the first gradient of some steps, and their updates left out."""
    for step, (x, y) in enumerate(batches(steps)):
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(training.model(x), y).backward()
        first = next(training.model.parameters())
        if step in bad:
            assert first.grad is not None
            first.grad[0, 0] = float("nan")
        if each is not None:
            each(step)
        before = [p.detach().clone() for p in training.model.parameters()]
        training.optimizer.step()
        if step in bad:
            with torch.no_grad():
                for p, good in zip(training.model.parameters(), before, strict=True):
                    p.copy_(good)


def test_a_bad_step_leaves_the_last_good_weights_and_the_bad_gradients(tmp_path: Path) -> None:
    hook, training = sgd(tmp_path)
    good: list[Tensor] = []
    train(training, 5, {3}, each=lambda _: good.append(training.model[0].weight.detach().clone()))  # type: ignore[index]
    snapshot = only(finished(hook))
    assert snapshot.metadata["step"] == "3"
    assert snapshot.metadata["reason"] == "gate"
    assert snapshot.metadata["parameters"] == "before the update"
    np.testing.assert_array_equal(snapshot.read("0.weight"), good[3].numpy())
    assert np.isnan(snapshot.read("0.weight:gradient")[0, 0])


def test_a_bad_loss_is_a_bad_step(tmp_path: Path) -> None:
    hook, training = sgd(tmp_path)
    training.run(2)
    training.optimizer.zero_grad()
    (training.model(torch.ones(1, 8)).sum() * float("inf")).backward()
    training.optimizer.step()
    snapshot = only(finished(hook))
    assert (snapshot.metadata["step"], snapshot.metadata["reason"]) == ("2", "gate")
    assert np.isfinite(snapshot.read("0.weight")).all()


def test_a_ring_keeps_what_led_to_a_bad_step(tmp_path: Path) -> None:
    hook, training = with_rings(tmp_path)
    settle = settler(hook)
    train(training, 20, {10}, each=lambda _: settle())
    run = finished(hook)
    assert steps_of(run) == [10]
    for collection in ("weights", "biases", "gradients"):
        steps = steps_of(run, collection)
        assert {9, 10, 19} <= set(steps)
        assert 3 not in steps
        assert 13 not in steps
    assert hook.health["counts"]["rotated_snapshots"] == 3 * 20 + 1 - len(run.snapshots())


def settler(hook: Hook) -> Callable[[], None]:
    """Waits until snapshots that were taken lie on the store, so that what is rotated does not depend on the disk."""
    snapshots = hook._session.snapshot_writer

    def settle() -> None:
        while not snapshots.settled:
            time.sleep(0.001)

    return settle


def test_what_does_not_fit_is_omitted_and_named(tmp_path: Path) -> None:
    hook, training = sgd(tmp_path, at_gate=False, memory_bytes=700)
    hook.snapshot()
    train(training, 1)
    snapshot = only(finished(hook))
    assert list(snapshot.tensors) == ["0.weight", "0.bias", "0.bias:gradient", "3.bias", "3.bias:gradient"]
    assert snapshot.missing == 12 - 5
    with pytest.raises(NotFoundError, match="raise Snapshots"):
        snapshot.read("0.weight:gradient")
    assert hook.health["counts"]["truncated_snapshots"] == 1


def test_of_a_bad_step_the_bad_tensors_come_first(tmp_path: Path) -> None:
    hook, training = sgd(tmp_path, memory_bytes=600)
    train(training, 3, {1})
    snapshot = only(finished(hook))
    assert "0.weight:gradient" in snapshot.tensors
    assert "0.weight" in snapshot.missing_names


def test_without_memory_for_anything_a_snapshot_is_dropped_and_counted(tmp_path: Path) -> None:
    hook, training = sgd(tmp_path, memory_bytes=0)
    train(training, 5, each=lambda step: hook.snapshot() if step % 2 == 0 else None)
    assert finished(hook).snapshots() == []
    assert hook.health["counts"]["dropped_snapshots"] == 3


class Mixed(nn.Module):
    """Parameters of several widths, one of them laid out by columns, one empty, one a single number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        self.tiny = nn.Parameter(torch.randn(7).to(torch.float8_e4m3fn), requires_grad=False)
        self.columns = nn.Parameter(torch.randn(5, 4).T)
        self.number = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.turning = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self) -> Tensor:
        used = (self.narrow.sum().float(), self.columns.sum(), self.number.float(), self.nothing.sum())
        return sum(used, torch.zeros(())) + self.turning.abs().sum()


def test_every_dtype_and_layout_is_read_by_us_and_by_stock_safetensors(tmp_path: Path) -> None:
    model, optimizer = with_sgd(Mixed())
    hook = hook_with(tmp_path)
    hook.watch(model, optimizer)
    hook.snapshot()
    model().backward()
    due = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {
        f"{name}:gradient": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    optimizer.step()
    snapshot = only(finished(hook))
    (path,) = tmp_path.rglob("*.safetensors")
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == (due | gradients).keys()
    for name, tensor in (due | gradients).items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        bits = loaded[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(bits, tensor.contiguous().reshape(-1).view(torch.uint8)), name
        assert snapshot.read(name).tobytes() == bits.numpy().tobytes()
        assert snapshot.read(name).shape == tuple(tensor.shape)
    assert (snapshot.tensors["narrow"].dtype, snapshot.tensors["tiny"].dtype) == ("BF16", "F8_E4M3")
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {
            "step": "0",
            "reason": "program",
            "parameters": "before the update",
        }
        assert torch.equal(file.get_tensor("narrow"), due["narrow"])


def request(hook: Hook, document: ControlDocument) -> None:
    """Let the hook see a control document."""
    hook._control_changed(document, "attempt")


def test_a_request_is_answered_once_however_often_the_document_changes(tmp_path: Path) -> None:
    hook, training = sgd(tmp_path)
    requests = (SnapshotRequest("first", 2), SnapshotRequest("second", 5))

    def change(step: int) -> None:
        request(hook, ControlDocument(step + 1, snapshots=requests))

    train(training, 9, each=change)
    run = finished(hook)
    assert [key.step for key in run.snapshots()] == [2, 5]
    snapshot = run.open_snapshot(run.snapshots()[1])
    assert (snapshot.metadata["reason"], snapshot.metadata["requests"]) == ("request", "second")


@pytest.mark.parametrize("asks", ["stop", "request"])
def test_a_stop_or_a_request_keeps_the_ring(tmp_path: Path, asks: str) -> None:
    hook, training = with_rings(tmp_path)
    settle = settler(hook)
    document = {
        "stop": ControlDocument(1, stop=StopRequest("other", 10**6, "enough")),
        "request": ControlDocument(1, snapshots=(SnapshotRequest("a", 10**6),)),
    }[asks]

    def each(step: int) -> None:
        settle()
        if step == 6:
            request(hook, document)

    train(training, 12, each=each)
    run = finished(hook)
    for collection in ("weights", "biases", "gradients"):
        assert {5, 11} <= set(steps_of(run, collection))
        assert 1 not in steps_of(run, collection)


def test_of_a_closure_the_snapshot_is_taken_before_the_update(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    hook = hook_with(tmp_path)
    hook.watch(model, optimizer)
    hook.snapshot()
    ((x, y),) = batches(1)
    before = next(model.parameters()).detach().clone()
    optimizer.step(closure_of(model, optimizer, x, y))
    snapshot = only(finished(hook))
    assert snapshot.metadata["parameters"] == "before the update"
    np.testing.assert_array_equal(snapshot.read("0.weight"), before.numpy())
    assert not torch.equal(before, next(model.parameters()))


def test_what_saved_tensors_cost_is_reported_and_takes_nothing_from_statistics(tmp_path: Path) -> None:
    ticks = iter(range(10**6))
    measured = {}
    for saved in (None, Cadence()):
        weights = Collection(ADAPTIVE, tensors=saved)
        config = CaptureConfig(collections={"weights": weights}, clock=lambda: next(ticks))
        training = Training(*with_sgd(small_model()))
        hook, _ = watched_training(tmp_path / str(saved is not None), training, run="r", config=config)
        train(training, 30)
        hook.close()
        overhead = hook.health["overhead"]
        measured[saved is not None] = (
            overhead["spent_seconds"],
            open_run(hook.run_url).tensor("0.weight").steps(),
        )
    assert measured[True][0] >= measured[False][0] + 30
    assert len(measured[True][1]) >= len(
        measured[False][1]
    )  # reading this clock takes time, which counts as the program's
