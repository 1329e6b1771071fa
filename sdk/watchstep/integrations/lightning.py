"""A Lightning callback, ``L.Trainer(callbacks=[WatchstepCallback()])``, and protection of Lightning's checkpoints.

Possible last good checkpoints are deleted later than by Lightning alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from watchstep.capture.framework_names import FrameworkName, FrameworkNames, health_of
from watchstep.format.control import StopRequest
from watchstep.hook import Hook
from watchstep.integrations.recording import CallbackRecording, OnStop, Ranks, contained_faults, missing

_RANKS = "one run of all ranks"
_CHECKPOINTS = "saved checkpoints"
_LOGGED = "values that the module logs"

at = FrameworkName.at
lightning_names = FrameworkNames(
    "Lightning",
    {
        "world_size": at(_RANKS, "lightning:*.world_size"),
        "nodes": at(_RANKS, "lightning:*.num_nodes"),
        "rank": at(_RANKS, "lightning:*.global_rank"),
        "local_rank": at(_RANKS, "lightning:*.local_rank"),
        "broadcast": at(_RANKS, "lightning:*.strategy.broadcast"),
        "global_step": at("the steps of a resumed training", "lightning:*.global_step"),
        "optimizers": at("the optimizer before its first update", "lightning:*.optimizers"),
        "model": at("the model as it is wrapped", "lightning:*.model"),
        "is_automatic": at("losses by their number of micro-batches", "lightning:*.automatic_optimization"),
        "micro_batches": at("losses by their number of micro-batches", "lightning:*.accumulate_grad_batches"),
        "metrics": at(_LOGGED, "lightning:*.callback_metrics"),
        "log_interval": at(_LOGGED, "lightning:*.log_every_n_steps"),
        "is_checking": at("validations apart from the sanity check", "lightning:*.sanity_checking"),
        "save": at(_CHECKPOINTS, "lightning:*.save_checkpoint"),
        "remove": at(_CHECKPOINTS, "lightning:*.strategy.remove_checkpoint"),
        "is_first_rank": at(_CHECKPOINTS, "lightning:*.is_global_zero"),
        "least_epochs": at("a stop before the minimum of epochs", "lightning:*.fit_loop.min_epochs"),
        "least_steps": at("a stop before the minimum of steps", "lightning:*.fit_loop.epoch_loop.min_steps"),
    },
)
"""Names of Lightning that another version may lack: the one place where they are looked up."""


class ProtectedCheckpoints:
    """Wraps a Trainer's ``save_checkpoint`` and its strategy's ``remove_checkpoint`` during a fit.

    All deletions use them: ``save_top_k``, ``save_last`` and the program's own callbacks. A protected checkpoint is deleted
    after a later one, as soon as it is no longer protected.
    """

    def __init__(self, trainer: Any, recording: CallbackRecording) -> None:
        self._recording = recording
        self._trainer, self._strategy = trainer, trainer.strategy
        self._save, self._remove = trainer.save_checkpoint, trainer.strategy.remove_checkpoint
        self._delayed: dict[str, Any] = {}
        trainer.save_checkpoint = self._save_checkpoint
        trainer.strategy.remove_checkpoint = self._remove_checkpoint

    def release(self) -> None:
        """Restore the methods at the end of a fit. Checkpoints that are still protected remain."""
        self._delete_unprotected()
        for state, name in ((self._trainer, "save_checkpoint"), (self._strategy, "remove_checkpoint")):
            vars(state).pop(name, None)

    def _save_checkpoint(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        self._save(filepath, *args, **kwargs)
        self._delayed.pop(str(filepath), None)
        if lightning_names.of(self._trainer, "is_first_rank", False):
            self._recording.saved(str(filepath))
        self._delete_unprotected()

    def _remove_checkpoint(self, filepath: Any) -> None:
        if str(filepath) in self._recording.protected():
            self._delayed[str(filepath)] = filepath
        else:
            self._remove(filepath)

    def _delete_unprotected(self) -> None:
        protected = self._recording.protected()
        for name in [name for name in self._delayed if name not in protected]:
            self._remove(self._delayed.pop(name))


try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    missing("lightning", "lightning", error)

_TRAINING_LOSS = re.compile(r"(train|training)?[_/]?loss(_step|_epoch)?")
"""Names of the training loss, which the hook records at every step."""

_VALIDATION_PREFIX = re.compile(r"^(val|valid|validation|eval)[_/]")


class WatchstepCallback(Callback):  # type: ignore[misc]
    """Records a Trainer's fits: everything that a `Hook` records, the learning rate, and the module's logged values.

    Each ``fit()`` is a separate run; one that resumes from a checkpoint continues the run, at its step. The run ends
    with the fit. Logged values are recorded every ``log_every_n_steps`` and after each validation, then in mode eval, with
    ``val_loss`` as ``loss``. The logged training loss is omitted, because the hook records it at each step.

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
        """Record with a hook that is created when training begins.

        Args:
            store_url: as for `Hook`.
            hook: the program's own hook instead, which stays open.
            on_stop: the effect of a stop: none (``"ignore"``, the default), the Trainer's early stop (``"stop"``; the default
                under ``watchstep run``), the same after a checkpoint (``"checkpoint"``: ``watchstep/<run>-<step>.ckpt`` in
                ``default_root_dir``), or `StopTraining` (``"raise"``).
            **options: ``run``, ``project``, ``rules``, ``guard``, ``config``, ``overhead_budget``, as for `Hook`.

        Raises:
            ConfigError: an argument is invalid.
        """
        super().__init__()
        self._recording = CallbackRecording(store_url, hook, on_stop, options)
        self._last: dict[str, Any] = {}
        self._minimums: dict[str, Any] = {}
        self._by_batch = False
        self._updates = 0
        self._checkpoints: ProtectedCheckpoints | None = None

    @property
    def hook(self) -> Hook | None:
        """The hook of the current fit, or of the last one."""
        return self._recording.hook

    @property
    def stopped(self) -> StopRequest | None:
        """The stop of the last fit; None if it was not stopped."""
        return self.hook.stopped if self.hook is not None else None

    @contained_faults
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a fit, or resume one from a checkpoint that has been loaded; the sanity check is over."""
        all_optimizers = lightning_names.of(trainer, "optimizers", ())
        optimizers = [optimizer for optimizer in all_optimizers if isinstance(optimizer, Optimizer)]
        self._updates = int(lightning_names.of(trainer, "global_step", 0))
        # It counts the updates of all optimizers.
        hook = self._recording.begin(self._updates // max(1, len(optimizers)), _ranks(trainer))
        lightning_names.report_to(health_of(hook))
        self._last = dict(lightning_names.of(trainer, "metrics", {}))
        wrapped = lightning_names.of(trainer, "model")
        model = wrapped if isinstance(wrapped, nn.Module) else pl_module
        is_automatic = lightning_names.of(pl_module, "is_automatic", True)
        self._by_batch = not is_automatic and len(optimizers) > 1
        self._recording.watch(
            model,
            optimizers[0] if optimizers else None,
            # Lightning divides by a number that a scheduler may change.
            loss_divisor=(lambda: lightning_names.of(trainer, "micro_batches", 1)) if is_automatic else 1.0,
        )
        if self._by_batch:
            self._recording.count_by_hand()
        if lightning_names.have(trainer, "save", "remove", "is_first_rank"):
            self._checkpoints = ProtectedCheckpoints(trainer, self._recording)

    @contained_faults
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a batch. The module may call itself or parts of itself."""
        self._begin_pass()

    @contained_faults
    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Begin a validation batch."""
        if not _is_checking(trainer):
            self._begin_pass()

    @contained_faults
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """End a batch: record logged values, and stop if requested."""
        hook = self._recording.hook
        if hook is None:
            return
        updates = lightning_names.of(trainer, "global_step", self._updates)
        if self._by_batch and updates != self._updates:
            self._updates = updates
            hook.step()
        interval = lightning_names.of(trainer, "log_interval", 0)
        if interval and updates % interval == 0:
            self._log_training(trainer)
        if self._recording.requested is not None and not trainer.should_stop:
            self._stop(trainer, hook)

    @contained_faults
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Discard values that were logged during training."""
        if not _is_checking(trainer):
            self._fresh(trainer)

    @contained_faults
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record a validation."""
        if not _is_checking(trainer) and self._recording.hook is not None:
            metrics = {
                _VALIDATION_PREFIX.sub("", name): value for name, value in self._fresh(trainer).items()
            }
            self._recording.log(metrics, "eval")

    @contained_faults
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End a fit, stopped or not."""
        self._release(trainer)
        self._recording.end()

    @contained_faults
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the program if requested, after all callbacks have seen the end of training."""
        self._recording.end_program()

    @contained_faults
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End a fit because of an exception, which may be `StopTraining`."""
        self._release(trainer)
        self._recording.end(exception)

    def _begin_pass(self) -> None:
        if self._recording.hook is not None:
            self._recording.hook.begin_pass()

    def _fresh(self, trainer: Any) -> dict[str, Any]:
        """Return the values that the module has logged since the last call."""
        metrics = dict(lightning_names.of(trainer, "metrics", {}))
        fresh = {name: value for name, value in metrics.items() if self._last.get(name) is not value}
        self._last = metrics
        return fresh

    def _log_training(self, trainer: Any) -> None:
        values = {
            name: value for name, value in self._fresh(trainer).items() if not _TRAINING_LOSS.fullmatch(name)
        }
        self._recording.log(values)

    def _stop(self, trainer: Any, hook: Hook) -> None:
        """End the fit after this batch, regardless of the minimum number of steps or epochs."""
        keys = [key for key in ("least_epochs", "least_steps") if lightning_names.have(trainer, key)]
        self._minimums = {key: lightning_names.of(trainer, key) for key in keys}
        for key in keys:
            lightning_names.put(trainer, key, None)
        trainer.should_stop = True
        if self._recording.on_stop == "checkpoint":
            folder = Path(trainer.default_root_dir) / "watchstep"
            step = lightning_names.of(trainer, "global_step", 0)
            trainer.save_checkpoint(folder / f"{hook.run}-{step}.ckpt")

    def _release(self, trainer: Any) -> None:
        """Restore the program's settings of the Trainer for its next fit."""
        for key, value in self._minimums.items():
            lightning_names.put(trainer, key, value)
        self._minimums = {}
        self._last = {}
        if self._checkpoints is not None:
            self._checkpoints.release()
            self._checkpoints = None


def _ranks(trainer: Any) -> Ranks | None:
    """Describe this rank. With Lightning's own launcher and Slurm's, only Lightning knows it."""
    keys = ("rank", "world_size", "local_rank", "nodes", "broadcast")
    if not lightning_names.have(trainer, *keys):
        return None  # then its launcher's environment tells
    rank, world_size, local_rank, nodes, broadcast = (lightning_names.of(trainer, key) for key in keys)
    if world_size <= 1:
        return None
    return Ranks(rank, world_size, local_rank, world_size // max(1, nodes), broadcast)


def _is_checking(trainer: Any) -> bool:
    """Return whether a validation is Lightning's sanity check, or may be."""
    return bool(lightning_names.of(trainer, "is_checking", True))
