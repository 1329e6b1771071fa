"""A callback for Lightning, ``L.Trainer(callbacks=[WatchstepCallback()])``, and the checkpoints that Lightning saves.

Checkpoints that may be the last good one are deleted later than Lightning would.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from watchstep.format.control import StopRequest
from watchstep.hook import Hook
from watchstep.integrations.recording import CallbackRecording, OnStop, Ranks, contained_faults, missing


class KeptCheckpoints:
    """Stands before a Trainer's ``save_checkpoint`` and its strategy's ``remove_checkpoint`` for as long as a fit goes on.

    All that deletes goes that way: ``save_top_k``, ``save_last`` and callbacks of the program's own. What is kept for now is deleted
    after a later checkpoint, as soon as it may be.
    """

    def __init__(self, trainer: Any, recording: CallbackRecording) -> None:
        self._recording = recording
        self._trainer, self._strategy = trainer, trainer.strategy
        self._save, self._remove = trainer.save_checkpoint, trainer.strategy.remove_checkpoint
        self._later: dict[str, Any] = {}
        trainer.save_checkpoint = self._saved
        trainer.strategy.remove_checkpoint = self._removed

    def release(self) -> None:
        """The fit is over. What may be the last good checkpoint still then stays."""
        self._delete_what_may_be()
        for state, name in ((self._trainer, "save_checkpoint"), (self._strategy, "remove_checkpoint")):
            vars(state).pop(name, None)

    def _saved(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        self._save(filepath, *args, **kwargs)
        self._later.pop(str(filepath), None)
        if self._trainer.is_global_zero:
            self._recording.saved(str(filepath))
        self._delete_what_may_be()

    def _removed(self, filepath: Any) -> None:
        if str(filepath) in self._recording.protected():
            self._later[str(filepath)] = filepath
        else:
            self._remove(filepath)

    def _delete_what_may_be(self) -> None:
        protected = self._recording.protected()
        for name in [name for name in self._later if name not in protected]:
            self._remove(self._later.pop(name))


try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    missing("lightning", "lightning", error)

_SEEN = re.compile(r"(train|training)?[_/]?loss(_step|_epoch)?")
"""What programs call the loss that the hook records of every step."""

_OF_VALIDATION = re.compile(r"^(val|valid|validation|eval)[_/]")


class WatchstepCallback(Callback):  # type: ignore[misc]
    """Records what a Trainer fits: what a `Hook` records, the learning rate, and what the module logs.

    Each ``fit()`` is a run of its own; one that resumes from a checkpoint goes on with the run, at its step. The run ends
    with it. What the module logs is recorded every ``log_every_n_steps`` and after each validation, in mode eval then,
    ``val_loss`` as ``loss``; a training loss is left out, which is recorded of each step anyway.

    Example::

        L.Trainer(callbacks=[WatchstepCallback("s3://bucket/runs")]).fit(module, data)
    """

    def __init__(
        self,
        store_url: str | os.PathLike[str] | None = None,
        *,
        hook: Hook | None = None,
        on_stop: OnStop | None = None,
        **options: Any,
    ) -> None:
        """Record by a hook that is made when training begins.

        Args:
            store_url: as `Hook` takes it.
            hook: the program's own instead, which stays open.
            on_stop: what a stop does: nothing (``"ignore"``, the default), the Trainer's own early end (``"stop"``; the default
                under ``watchstep run``), the same after a checkpoint (``"checkpoint"``: ``watchstep/<run>-<step>.ckpt`` below
                ``default_root_dir``), or `StopTraining` (``"raise"``).
            **options: ``run``, ``project``, ``rules``, ``guard``, ``config``, ``overhead_budget``, as `Hook` takes them.

        Raises:
            ConfigError: an argument is wrong.
        """
        super().__init__()
        self._recording = CallbackRecording(store_url, hook, on_stop, options)
        self._last: dict[str, Any] = {}
        self._least: tuple[Any, Any] | None = None
        self._by_batch = False
        self._updates = 0
        self._checkpoints: KeptCheckpoints | None = None

    @property
    def hook(self) -> Hook | None:
        """Of the fit that is under way, or of the last one."""
        return self._recording.hook

    @property
    def stopped(self) -> StopRequest | None:
        """Why the last fit was stopped, where it was."""
        return self.hook.stopped if self.hook is not None else None

    @contained_faults
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A fit begins, or goes on from a checkpoint that has been read; the sanity check is over."""
        optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Optimizer)]
        updates = int(trainer.global_step) // max(1, len(optimizers))  # it counts the updates of all
        self._recording.begin(updates, _ranks(trainer))
        self._last = dict(trainer.callback_metrics)
        model = trainer.model if isinstance(trainer.model, nn.Module) else pl_module
        self._updates = trainer.global_step
        self._by_batch = not pl_module.automatic_optimization and len(optimizers) > 1
        self._recording.watch(
            model,
            optimizers[0] if optimizers else None,
            # Lightning divides by what a scheduler may change.
            loss_divisor=(lambda: trainer.accumulate_grad_batches)
            if pl_module.automatic_optimization
            else 1.0,
        )
        if self._by_batch:
            self._recording.count_by_hand()
        self._checkpoints = KeptCheckpoints(trainer, self._recording)

    @contained_faults
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch begins; whether the module calls itself or its parts is its own business."""
        self._begin_pass()

    @contained_faults
    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """A batch of a validation begins."""
        if not trainer.sanity_checking:
            self._begin_pass()

    @contained_faults
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """A batch is done: the place for logs, and for a stop."""
        hook = self._recording.hook
        if hook is None:
            return
        if self._by_batch and trainer.global_step != self._updates:
            self._updates = trainer.global_step
            hook.step()
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log_training(trainer)
        if self._recording.asked is not None and not trainer.should_stop:
            self._stop(trainer, hook)

    @contained_faults
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """What was logged before is training's."""
        if not trainer.sanity_checking:
            self._fresh(trainer)

    @contained_faults
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """A validation is done."""
        if not trainer.sanity_checking and self._recording.hook is not None:
            metrics = {_OF_VALIDATION.sub("", name): value for name, value in self._fresh(trainer).items()}
            self._recording.log(metrics, "eval")

    @contained_faults
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The fit is over, stopped or not."""
        self._release(trainer)
        self._recording.end()

    @contained_faults
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """All callbacks have seen the end of the training."""
        self._recording.end_program()

    @contained_faults
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit ends by an exception, which may be `StopTraining`."""
        self._release(trainer)
        self._recording.end(exception)

    def _begin_pass(self) -> None:
        if self._recording.hook is not None:
            self._recording.hook.begin_pass()

    def _fresh(self, trainer: Any) -> dict[str, Any]:
        """What the module has logged since the last call."""
        metrics = dict(trainer.callback_metrics)
        fresh = {name: value for name, value in metrics.items() if self._last.get(name) is not value}
        self._last = metrics
        return fresh

    def _log_training(self, trainer: Any) -> None:
        values = {name: value for name, value in self._fresh(trainer).items() if not _SEEN.fullmatch(name)}
        self._recording.log(values)

    def _stop(self, trainer: Any, hook: Hook) -> None:
        """End the fit after this batch, whatever the least number of steps or epochs."""
        loop = trainer.fit_loop
        self._least = (loop.min_epochs, loop.epoch_loop.min_steps)
        loop.min_epochs = loop.epoch_loop.min_steps = None
        trainer.should_stop = True
        if self._recording.on_stop == "checkpoint":
            folder = Path(trainer.default_root_dir) / "watchstep"
            trainer.save_checkpoint(folder / f"{hook.run}-{trainer.global_step}.ckpt")

    def _release(self, trainer: Any) -> None:
        """What the program set for the Trainer holds for its next fit."""
        if self._least is not None:
            loop = trainer.fit_loop
            loop.min_epochs, loop.epoch_loop.min_steps = self._least
            self._least = None
        self._last = {}
        if self._checkpoints is not None:
            self._checkpoints.release()
            self._checkpoints = None


def _ranks(trainer: Any) -> Ranks | None:
    """Who this rank is. Lightning's own launcher and Slurm's say so to Lightning alone."""
    if trainer.world_size <= 1:
        return None
    local = trainer.world_size // max(1, trainer.num_nodes)
    return Ranks(
        trainer.global_rank, trainer.world_size, trainer.local_rank, local, trainer.strategy.broadcast
    )
