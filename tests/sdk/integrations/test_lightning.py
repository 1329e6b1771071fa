"""The callback for Lightning, in the real Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sdk.integrations.models import column, last_good_of, loader, request_stop, run_of_ranks
from tests.sdk.training import EVERY_STEP, small_model
from watchstep import Hook, Run, StopTraining, open_run

L: Any = pytest.importorskip(
    "lightning", reason="LIGHTNING IS NOT INSTALLED: its callback is not proven by this run"
)
from watchstep.integrations.lightning import WatchstepCallback  # noqa: E402 - it needs lightning

pytestmark = [
    pytest.mark.ci,
    # Lightning's advice on loaders, loggers and Slurm, and its own use of what PyTorch deprecates.
    pytest.mark.filterwarnings("ignore:The `srun` command is available on your system but is not used"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*tensorboardX.*has been removed as a dependency.*"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning"),
]


class Module(L.LightningModule):  # type: ignore[misc]
    """Calls its submodule, never itself, as many modules do."""

    def __init__(self, bad_batch: int | None = None) -> None:
        super().__init__()
        self.net = small_model()
        self._bad_batch = bad_batch
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        x = x * float("nan") if batch_idx == self._bad_batch else x
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        self.log("accuracy", (logits.argmax(1) == y).float().mean())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Validated(Module):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean())


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> Any:
    settings = {
        "max_steps": 4,
        "log_every_n_steps": 2,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        **settings,
    }
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=settings.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def recorded(callback: WatchstepCallback) -> Run:
    assert callback.hook is not None
    assert not callback.hook.health["faults"]
    return open_run(callback.hook.run_url)


class Asking(L.Callback):  # type: ignore[misc]
    """Asks for a stop as the service does, once training has begun."""

    def __init__(self, callback: WatchstepCallback, step: int) -> None:
        self._callback, self._step = callback, step

    def on_train_start(self, *_: Any) -> None:
        assert self._callback.hook is not None
        request_stop(self._callback.hook, self._step)


def test_one_line_records_a_fit(tmp_path: Path) -> None:
    callback, module = WatchstepCallback(tmp_path, run="r", config=EVERY_STEP), Validated()
    fitted = trainer(tmp_path, callback, limit_val_batches=2, val_check_interval=2, num_sanity_val_steps=1)
    fitted.fit(module, loader(64), loader(16))
    run = recorded(callback)
    for name in ("net.0.weight", "net.0.weight:gradient", "net.0:output", "loss"):
        assert list(column(run, name)) == [0, 1, 2, 3], name
    assert list(column(run, "loss").values()) == pytest.approx(module.losses)
    assert column(run, "optimizer:learning_rate/0") == {0: 1e-2}
    assert list(column(run, "accuracy")) == [1, 3]
    assert list(column(run, "loss", mode="eval")) == list(column(run, "accuracy", mode="eval")) == [1, 3]
    assert column(run, "loss", mode="eval")[3] == pytest.approx(fitted.callback_metrics["val_loss"].item())
    assert list(column(run, "net.0:output", mode="eval")) == [1, 3]
    assert {"train_loss", "val_loss"}.isdisjoint(run.tensors())
    (end,) = run.ends()
    assert (end.state, end.last_step) == ("completed", 3)


def test_micro_batches_are_one_step_whose_loss_is_their_mean(tmp_path: Path) -> None:
    callback, module = WatchstepCallback(tmp_path, config=EVERY_STEP), Module()
    trainer(tmp_path, callback, accumulate_grad_batches=3, max_steps=3).fit(module, loader(64))
    run, losses = recorded(callback), module.losses
    due = [sum(losses[:3]) / 3, sum(losses[3:6]) / 3, sum(losses[6:]) / 2]  # the last is short
    assert list(column(run, "loss").values()) == pytest.approx(due)
    assert list(column(run, "net.0:output", "count").values()) == [3 * 8 * 16, 3 * 8 * 16, 2 * 8 * 16]


def test_a_fit_is_the_same_with_it(tmp_path: Path) -> None:
    bare, watched = Module(), Module()
    trainer(tmp_path).fit(bare, loader(64))
    trainer(tmp_path, WatchstepCallback(tmp_path, config=EVERY_STEP)).fit(watched, loader(64))
    assert bare.losses == watched.losses
    for left, right in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("on_stop", "saved"), [("stop", False), ("checkpoint", True)])
def test_a_stop_is_the_trainers_own_early_end(tmp_path: Path, on_stop: Any, saved: bool) -> None:
    callback = WatchstepCallback(tmp_path, run="r", on_stop=on_stop, config=EVERY_STEP)
    fitted = trainer(tmp_path, callback, Asking(callback, 1), max_steps=20, min_steps=10)
    fitted.fit(Module(), loader(64))
    assert (fitted.global_step, fitted.fit_loop.min_steps) == (2, 10)
    (end,) = recorded(callback).ends()
    assert (end.state, end.last_step, end.reason) == ("stopped", 1, "nan_or_inf: 3 NaN")
    assert (tmp_path / "watchstep" / "r-2.ckpt").exists() is saved


def test_who_did_not_opt_in_is_not_stopped(tmp_path: Path) -> None:
    callback = WatchstepCallback(tmp_path, config=EVERY_STEP)
    fitted = trainer(tmp_path, callback, Asking(callback, 1))
    fitted.fit(Module(), loader(64))
    assert fitted.global_step == 4


def test_a_guard_ends_the_fit_before_the_bad_update(tmp_path: Path) -> None:
    callback, module = WatchstepCallback(tmp_path, guard=True, config=EVERY_STEP), Module(bad_batch=2)
    with pytest.raises(StopTraining) as stop:
        trainer(tmp_path, callback, gradient_clip_val=0.1).fit(module, loader(64))
    assert stop.value.step == 2
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    (end,) = recorded(callback).ends()
    assert (end.state, end.reason.partition(":")[0]) == ("stopped", "nan_or_inf")


def test_an_exception_ends_the_run_as_failed(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("a batch of another shape")
            return super().training_step(batch, batch_idx)

    callback = WatchstepCallback(tmp_path, config=EVERY_STEP)
    with pytest.raises(ValueError, match="another shape"):
        trainer(tmp_path, callback).fit(Failing(), loader(64))
    (end,) = recorded(callback).ends()
    assert (end.state, end.reason) == ("failed", "ValueError: a batch of another shape")


def test_a_resumed_fit_continues_with_its_run_and_others_have_runs_of_their_own(tmp_path: Path) -> None:
    callback = WatchstepCallback(tmp_path, run="r", config=EVERY_STEP)
    first = trainer(tmp_path, callback, max_steps=2)
    first.fit(Module(), loader(64))
    first.save_checkpoint(tmp_path / "two.ckpt")
    trainer(tmp_path, callback, max_steps=4).fit(Module(), loader(64), ckpt_path=tmp_path / "two.ckpt")
    run = recorded(callback)
    assert callback.hook is not None
    assert (callback.hook.run, list(column(run, "loss"))) == ("r", [0, 1, 2, 3])
    trainer(tmp_path, callback, max_steps=1).fit(Module(), loader(64))
    assert callback.hook.run == "r-3"


def test_a_hook_of_the_programs_own_stays_open(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    trainer(tmp_path, WatchstepCallback(hook=hook), max_steps=2).fit(Module(), loader(64))
    hook.log(afterwards=1.0)
    hook.close()
    assert "afterwards" in open_run(hook.run_url).tensors()


def test_several_optimizers_by_hand(tmp_path: Path) -> None:
    class Two(Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = small_model(seed=3)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            first.step()
            second.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.other(batch[0]), batch[1]))
            second.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]

    callback = WatchstepCallback(tmp_path, config=EVERY_STEP)
    trainer(tmp_path, callback, max_steps=6).fit(Two(), loader(64))
    run = recorded(callback)
    for name in ("net.0.weight:gradient", "other.0.weight:gradient", "other.0:output", "loss", "loss_2"):
        assert list(column(run, name)) == [0, 1, 2], name


_RANKS = """
import sys
from pathlib import Path
from tests.sdk.integrations.test_lightning import *
callback = WatchstepCallback(sys.argv[1] + "/runs", config=EVERY_STEP, on_stop="checkpoint")
fitted = trainer(Path(sys.argv[1]), callback, Asking(callback, 2), max_steps=20, devices=2, strategy="ddp")
fitted.fit(Module(), loader(512))
assert fitted.global_step == 3, fitted.global_step
assert not callback.hook.health["faults"], callback.hook.health["faults"]
"""


@pytest.mark.ci
def test_ranks_that_lightning_launches_record_one_run_and_stop_after_the_same_step(tmp_path: Path) -> None:
    run = run_of_ranks(tmp_path, _RANKS)
    assert run.tensor("net.0.weight").statistics().to_pydict()["step"] == [0, 1, 2]
    assert len(list((tmp_path / "watchstep").glob("*.ckpt"))) == 1


def rotating(folder: Path, **settings: Any) -> Any:
    return L.pytorch.callbacks.ModelCheckpoint(
        folder / "checkpoints",
        "{step}",
        every_n_train_steps=1,
        save_top_k=1,
        monitor="step",
        mode="max",
        **settings,
    )


@pytest.mark.parametrize(
    ("judged_seconds", "remaining"), [(3600.0, {"step=1", "step=2", "step=3", "step=4"}), (0.0, {"step=4"})]
)
def test_its_rotation_leaves_what_may_be_the_last_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged_seconds: float, remaining: set[str]
) -> None:
    monkeypatch.setattr("watchstep.capture.checkpoint_notes.EVALUATED_SECONDS", judged_seconds)
    callback = WatchstepCallback(tmp_path, run="r", config=EVERY_STEP)
    fitted = trainer(tmp_path, callback, rotating(tmp_path), enable_checkpointing=True)
    fitted.fit(Module(), loader(64))
    assert {place.stem for place in (tmp_path / "checkpoints").iterdir()} == remaining
    assert not {"save_checkpoint"} & set(vars(fitted))
    assert not {"remove_checkpoint"} & set(vars(fitted.strategy))
    recorded(callback)
    assert last_good_of(callback.hook) == (tmp_path / "checkpoints" / "step=3.ckpt", 2)


def test_where_its_launcher_requests_a_checkpoint_the_program_ends_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    callback = WatchstepCallback(tmp_path, run="r", config=EVERY_STEP)
    with pytest.raises(StopTraining) as stopped:
        trainer(tmp_path, callback, Asking(callback, 1), max_steps=20).fit(Module(), loader(64))
    assert (stopped.value.code, stopped.value.step) == (86, 1)
    assert (tmp_path / "watchstep" / "r-2.ckpt").exists()
    (end,) = recorded(callback).ends()
    assert (end.state, end.last_step) == ("stopped", 1)
