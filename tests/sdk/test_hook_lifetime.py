"""What remains in a process after recording, and what recording keeps alive meanwhile."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sdk.programs import run_program
from tests.sdk.training import EVERY_STEP, Training, batches, recorded, small_model, watched_training
from watchstep import Hook
from watchstep.pytorch import losses
from watchstep.pytorch.parameters import amp, clipping, optimizer_steps


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def record_one(store: Path) -> None:
    hook, training = watched_training(store)
    training.run(2)
    hook.close()


ALONE = """
import sys, threading
from pathlib import Path
from tests.sdk.test_hook_lifetime import descriptors, record_one

folder = Path(sys.argv[1])
record_one(folder)  # libraries open theirs once
before = threading.active_count(), descriptors()
for _ in range(5):
    record_one(folder)
print(before, (threading.active_count(), descriptors()), sep="\\n")
"""


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_repeated_recordings_leave_no_thread_and_no_file_open(tmp_path: Path) -> None:
    """In a separate process, because leftovers of other tests are closed at any time."""
    before, after = run_program(tmp_path, ALONE, tmp_path / "runs").splitlines()
    assert before == after


def test_off_the_main_thread_too(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    for _ in range(3):
        thread = threading.Thread(target=record_one, args=(tmp_path,))
        thread.start()
        thread.join()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Without the collector of cycles only what nothing refers to is freed."""
    record = Training()
    record.run(1)  # PyTorch's own first use leaves a cycle behind
    del record
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def plainly(hook: Hook, training: Training) -> None:
    training.run(2)
    hook.close()


def by_an_exception(hook: Hook, training: Training) -> None:
    with pytest.raises(KeyError), hook:  # noqa: PT012 - the exception leaves the block of the hook
        training.run(2)
        raise KeyError


def with_everything(hook: Hook, training: Training) -> None:
    def each(_step: int, _loss: torch.Tensor) -> None:
        hook.record(labels=torch.ones(8, dtype=torch.long), outputs=torch.eye(8))
        hook.snapshot()
        training.model.eval()
        with torch.no_grad():
            training.model(torch.ones(4, 8))
        training.model.train()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)

    training.run(3, each)
    hook.close()


def after_a_step_that_raises(hook: Hook, training: Training) -> None:
    training.run(2)
    with pytest.raises(TypeError):
        training.optimizer.step("no closure")  # type: ignore[call-overload]
    hook.close()


WAYS = {way.__name__: way for way in (plainly, by_an_exception, with_everything, after_a_step_that_raises)}


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("guard", [None, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_closed_hook_keeps_no_model_and_listens_to_nothing(
    tmp_path: Path, way: str, guard: bool | None
) -> None:
    hook, training = watched_training(tmp_path, guard=guard)
    WAYS[way](hook, training)
    model, optimizer = weakref.ref(training.model), weakref.ref(training.optimizer)
    del training
    assert model() is None
    assert optimizer() is None
    assert hook.health["counts"]["rows"] > 0
    listening = (losses, clipping, amp, optimizer_steps)
    assert not any(hook_module._listeners for hook_module in listening)


def test_recording_keeps_no_activations_or_gradients(tmp_path: Path) -> None:
    hook, model = Hook(tmp_path, config=EVERY_STEP), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.parameters())
    references: list[weakref.ref[torch.Tensor]] = []
    model[1].register_forward_hook(lambda _module, _given, out: references.append(weakref.ref(out)))
    hook.watch(model, optimizer)
    for x, _ in batches(3):
        model(x).sum().backward()
        assert weight.grad is not None
        references.append(weakref.ref(weight.grad))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert [reference() for reference in references] == [None] * 6
    hook.close()


def test_a_copy_of_a_hook_is_the_hook_and_a_pickled_hook_records_nothing(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    objects: dict[str, Any] = {"model": training.model, "hook": hook}
    assert copy.deepcopy(objects)["hook"] is hook
    sent = pickle.loads(pickle.dumps(objects))["hook"]
    names = {name for name in dir(Hook) if not name.startswith("_")}
    assert names | {"store_url"} == {name for name in dir(sent) if not name.startswith("_")}
    with sent:
        sent.watch(training.model)
        sent.log(loss=1.0)
        sent.step()
        sent.record(labels=[1])
    training.run(3)
    assert recorded(hook).steps() == [0, 1, 2]
