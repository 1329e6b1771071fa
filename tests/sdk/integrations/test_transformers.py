"""The callback for transformers, in the real Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sdk.integrations.models import (
    Classifier,
    Examples,
    column,
    last_good_of,
    request_stop,
    run_of_ranks,
)
from tests.sdk.training import EVERY_STEP
from watchstep import Hook, Run, StopTraining, open_run
from watchstep.errors import ConfigError

transformers: Any = pytest.importorskip(
    "transformers", reason="TRANSFORMERS IS NOT INSTALLED: its callback is not proven by this run"
)
from watchstep.integrations.transformers import WatchstepCallback  # noqa: E402 - it needs transformers

pytestmark = [
    pytest.mark.release,
    pytest.mark.filterwarnings(
        # The DataLoader that the Trainer makes asks for pinned memory, and there is no accelerator.
        "ignore:'pin_memory' argument is set as true:UserWarning"
    ),
]


def trainer(folder: Path, *callbacks: Any, model: Any = None, **arguments: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **arguments,
    }
    return transformers.Trainer(
        model=model if model is not None else Classifier(),
        args=transformers.TrainingArguments(str(folder / "output"), **settings),
        train_dataset=Examples(64),
        eval_dataset=Examples(16, seed=2),
        callbacks=list(callbacks),
    )


def recorded(callback: WatchstepCallback) -> Run:
    assert callback.hook is not None
    assert not callback.hook.health["faults"]
    return open_run(callback.hook.run_url)


class Asking(transformers.TrainerCallback):  # type: ignore[misc]
    """Asks for a stop once training has begun."""

    def __init__(self, callback: WatchstepCallback, step: int) -> None:
        self._callback, self._step = callback, step

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        assert self._callback.hook is not None
        request_stop(self._callback.hook, self._step)


def test_one_line_records_a_training(tmp_path: Path) -> None:
    callback = WatchstepCallback(tmp_path, run="r", config=EVERY_STEP)
    trained = trainer(tmp_path, callback, eval_strategy="steps", eval_steps=2)
    trained.train()
    run = recorded(callback)
    assert list(column(run, "net.0.weight:gradient")) == [0, 1, 2, 3]
    assert list(column(run, "net.0:output")) == [0, 1, 2, 3]
    assert list(column(run, "loss")) == [0, 1, 2, 3]
    logs = [entry for entry in trained.state.log_history if "learning_rate" in entry]
    assert column(run, "learning_rate") == {1: logs[0]["learning_rate"], 3: logs[1]["learning_rate"]}
    assert column(run, "optimizer:learning_rate/0")[3] == pytest.approx(
        1.25e-5
    )  # the last quarter of a linear schedule
    assert (column(run, "loss")[0] + column(run, "loss")[1]) / 2 == pytest.approx(logs[0]["loss"], rel=1e-3)
    assert column(run, "gradient_norm")[1] == pytest.approx(logs[0]["grad_norm"], rel=1e-3)
    evaluated = [entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry]
    assert column(run, "loss", mode="eval") == {1: evaluated[0], 3: evaluated[1]}
    assert {"grad_norm", "train_loss", "eval_loss", "epoch", "runtime"}.isdisjoint(run.tensors())
    (end,) = run.ends()
    assert (end.state, end.last_step) == ("completed", 3)


def test_micro_batches_are_one_step_whose_loss_is_their_mean(tmp_path: Path) -> None:
    callback = WatchstepCallback(tmp_path, config=EVERY_STEP)
    trained = trainer(tmp_path, callback, gradient_accumulation_steps=4, logging_steps=1, max_steps=2)
    trained.train()
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    found = column(recorded(callback), "loss")
    assert list(found) == [0, 1]
    assert list(found.values()) == pytest.approx(losses, rel=1e-3)


def test_a_training_is_the_same_with_it(tmp_path: Path) -> None:
    bare, watched = trainer(tmp_path), trainer(tmp_path, WatchstepCallback(tmp_path, config=EVERY_STEP))
    bare.train()
    watched.train()
    for left, right in zip(bare.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("on_stop", "saved"), [("stop", False), ("checkpoint", True)])
def test_a_stop_is_the_trainers_own_early_end(tmp_path: Path, on_stop: Any, saved: bool) -> None:
    callback = WatchstepCallback(tmp_path, on_stop=on_stop, config=EVERY_STEP)
    trained = trainer(tmp_path, callback, Asking(callback, 1), max_steps=20)
    trained.train()
    assert trained.state.global_step == 2
    assert callback.stopped is not None
    assert callback.stopped.reason == "nan_or_inf: 3 NaN"
    (end,) = recorded(callback).ends()
    assert (end.state, end.last_step) == ("stopped", 1)
    assert (tmp_path / "output" / "checkpoint-2").exists() is saved


def test_who_did_not_opt_in_is_not_stopped(tmp_path: Path) -> None:
    callback = WatchstepCallback(tmp_path, config=EVERY_STEP)
    trained = trainer(tmp_path, callback, Asking(callback, 1))
    trained.train()
    assert trained.state.global_step == 4


def test_a_guard_stops_before_the_bad_update(tmp_path: Path) -> None:
    callback = WatchstepCallback(tmp_path, guard=True, config=EVERY_STEP)
    trained = trainer(tmp_path, callback, model=Classifier(bad_batch=2))
    with pytest.raises(StopTraining) as stop:
        trained.train()
    assert stop.value.step == 2
    assert all(parameter.isfinite().all() for parameter in trained.model.parameters())
    callback.close()
    (end,) = recorded(callback).ends()
    assert (end.state, end.reason.partition(":")[0]) == ("stopped", "nan_or_inf")


def test_a_resumed_training_continues_with_its_run_and_others_have_runs_of_their_own(tmp_path: Path) -> None:
    callback = WatchstepCallback(tmp_path, run="r", config=EVERY_STEP)
    trainer(tmp_path, callback, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer(tmp_path, callback, max_steps=4).train(
        resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-2")
    )
    run = recorded(callback)
    assert callback.hook is not None
    assert callback.hook.run == "r"
    assert list(column(run, "loss")) == [0, 1, 2, 3]
    assert len(run.ends()) == 2
    trainer(tmp_path, callback, max_steps=1).train()
    assert callback.hook.run == "r-3"
    assert list(column(recorded(callback), "loss")) == [0]


def test_a_hook_of_the_programs_own_stays_open(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    trained = trainer(tmp_path, WatchstepCallback(hook=hook), max_steps=2)
    trained.train()
    trained.train()
    hook.close()
    assert list(column(open_run(hook.run_url), "loss")) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="hook="):
        WatchstepCallback(tmp_path, hook=hook)


def test_a_fault_of_the_callback_never_reaches_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = WatchstepCallback(tmp_path, config=EVERY_STEP)
    monkeypatch.setattr(callback._recording, "log", lambda *_: 1 / 0)
    trained = trainer(tmp_path, callback)
    trained.train()
    assert trained.state.global_step == 4
    assert callback.hook is not None
    assert "on_log" in callback.hook.health["faults"]


def test_wrong_arguments_are_reported_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_stop"):
        WatchstepCallback(tmp_path, on_stop="kill")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rulez"):
        WatchstepCallback(tmp_path, rulez="rules.yaml")


_RANKS = """
import sys
from pathlib import Path
from tests.sdk.integrations.test_transformers import *
callback = WatchstepCallback(sys.argv[1] + "/runs", config=EVERY_STEP, on_stop="stop")
trained = trainer(Path(sys.argv[1]), callback, Asking(callback, 2), max_steps=20)
trained.train()
assert trained.state.global_step == 3, trained.state.global_step
assert not callback.hook.health["faults"], callback.hook.health["faults"]
"""


@pytest.mark.release
def test_ranks_record_one_run_and_stop_after_the_same_step(tmp_path: Path) -> None:
    run = run_of_ranks(tmp_path, _RANKS, ranks=2)
    assert run.tensor("net.0.weight").statistics().to_pydict()["step"] == [0, 1, 2]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(place.name.rpartition("-")[2]) for place in (folder / "output").glob("checkpoint-*"))


@pytest.mark.parametrize(("judged_seconds", "remaining"), [(3600.0, [1, 2, 3, 4]), (0.0, [3, 4])])
def test_its_rotation_leaves_what_may_be_the_last_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged_seconds: float, remaining: list[int]
) -> None:
    monkeypatch.setattr("watchstep.capture.checkpoint_notes.EVALUATED_SECONDS", judged_seconds)
    callback = WatchstepCallback(tmp_path, run="r", config=EVERY_STEP)
    trained = trainer(tmp_path, callback, save_strategy="steps", save_steps=1, save_total_limit=1)
    trained.train()
    assert saved_steps(tmp_path) == remaining
    assert trained.args.save_total_limit == 1
    assert last_good_of(callback.hook) == (tmp_path / "output" / "checkpoint-3", 2)


def test_where_its_launcher_requests_a_checkpoint_the_program_ends_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    callback = WatchstepCallback(tmp_path, run="r", config=EVERY_STEP)
    trained = trainer(
        tmp_path, callback, Asking(callback, 1), max_steps=20, save_strategy="steps", save_steps=50
    )
    with pytest.raises(StopTraining) as stopped:
        trained.train()
    assert (stopped.value.code, stopped.value.step) == (86, 1)
    assert saved_steps(tmp_path) == [2]
    (end,) = recorded(callback).ends()
    assert (end.state, end.last_step) == ("stopped", 1)


def test_each_step_has_the_samples_that_the_model_got(tmp_path: Path) -> None:
    """It fetches batches ahead; here with accumulation and evaluations."""
    passes: list[Any] = []

    class Observed(Classifier):
        def forward(self, x: Any, labels: Any) -> Any:
            if self.training:
                passes.append(x.detach().clone())
            return super().forward(x, labels)

    callback = WatchstepCallback(str(tmp_path / "store"))
    trainer(
        tmp_path,
        callback,
        model=Observed(),
        max_steps=5,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    ).train()
    examples = Examples(64)
    inputs = torch.stack([examples[index]["x"] for index in range(64)])
    truth = [[int((inputs == row).all(1).nonzero()[0, 0]) for row in batch] for batch in passes]
    run = recorded(callback)
    batches = [run.samples(step) for step in range(5)]
    assert [len(found) for found in batches] == [2] * 5
    assert [list(batch.ids) for found in batches for batch in found] == truth
