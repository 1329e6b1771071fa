"""A callback for the Hugging Face Trainer: ``Trainer(…, callbacks=[WatchstepCallback()])``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from watchstep.capture.framework_names import FrameworkName, FrameworkNames, health_of
from watchstep.format.control import StopRequest
from watchstep.format.tensors import Mode
from watchstep.hook import Hook
from watchstep.integrations.recording import CallbackRecording, OnStop, contained_faults, missing

try:
    from transformers import TrainerCallback
except ImportError as error:
    missing("transformers", "transformers", error)

from watchstep.integrations.accelerate import accelerate_names, plain_optimizer, ranks_of, replicates

_RANKS = "one run of all ranks"
_CHECKPOINTS = "saved checkpoints"

at = FrameworkName.at
trainer_names = FrameworkNames(
    "transformers",
    {
        "world_size": at(_RANKS, "transformers:*.world_size"),
        "rank": at(_RANKS, "transformers:*.process_index"),
        "local_rank": at(_RANKS, "transformers:*.local_process_index"),
        "global_step": at("the steps of a resumed training", "transformers:*.global_step"),
        "micro_batches": at("sums of losses of micro-batches", "transformers:*.gradient_accumulation_steps"),
        "max_norm": at("whether gradients are clipped", "transformers:*.max_grad_norm"),
        "replicas": at("whether the model is replicated in this process", "transformers:*.n_gpu"),
        "limit": at(_CHECKPOINTS, "transformers:*.save_total_limit"),
        "folder": at(_CHECKPOINTS, "transformers:*.output_dir"),
        "saves_here": at(_CHECKPOINTS, "transformers:*.should_save"),
        "best": at(_CHECKPOINTS, "transformers:*.best_model_checkpoint"),
    },
)
"""Names of transformers that another version may lack: the one place where they are looked up."""

_TRAINING_LOSS = {"loss", "train_loss"}
"""Names of the training loss, which the hook records at every step and the Trainer as a mean."""

_IGNORED = {"epoch", "total_flos", "step"}
_IGNORED_SUFFIXES = ("_runtime", "_per_second", "_preparation_time")


class WatchstepCallback(TrainerCallback):  # type: ignore[misc]
    """Records a Trainer's training: everything that a `Hook` records, and what the Trainer logs and evaluates.

    Each ``train()`` is a separate run; one that resumes from a checkpoint continues the run, at its step. The run ends
    with the training. The Trainer's logged loss and gradient norm are omitted, because the hook records them at each
    step. Evaluations are in mode eval, with ``eval_loss`` as ``loss``.

    Example::

        Trainer(model, arguments, train_dataset=data, callbacks=[WatchstepCallback("s3://bucket/runs")])
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
                under ``watchstep run``), the same with a checkpoint (``"checkpoint"``), or `StopTraining` (``"raise"``).
            **options: ``run``, ``project``, ``rules``, ``guard``, ``config``, ``overhead_budget``, as for `Hook`.

        Raises:
            ConfigError: an argument is invalid.
        """
        super().__init__()
        self._recording = CallbackRecording(store_url, hook, on_stop, options)
        self._sets: list[str] = []
        self._sees_norm = True
        self._limit: int | None = None
        self._resumed = False

    @property
    def hook(self) -> Hook | None:
        """The hook of the current training, or of the last one."""
        return self._recording.hook

    @property
    def stopped(self) -> StopRequest | None:
        """The stop of the last training; None if it was not stopped."""
        return self.hook.stopped if self.hook is not None else None

    def close(self) -> None:
        """End the recording of a training that raised an exception, if the program continues."""
        self._recording.end()

    @contained_faults
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a training, or resume one from a checkpoint that has been loaded."""
        first_step = int(trainer_names.of(state, "global_step", 0))
        ranks = None
        if trainer_names.have(args, "world_size", "rank", "local_rank"):
            ranks = ranks_of(*(trainer_names.of(args, key) for key in ("world_size", "rank", "local_rank")))
        hook = self._recording.begin(first_step, ranks)
        for names in (trainer_names, accelerate_names):
            names.report_to(health_of(hook))
        self._sets = []
        self._limit = trainer_names.of(args, "limit")
        self._resumed = first_step > 0
        is_replicated = replicates()
        self._sees_norm = is_replicated and trainer_names.of(args, "max_norm", 0) > 0
        if trainer_names.of(args, "replicas", 1) > 1:
            self._recording.fault(
                "watch",
                RuntimeError(
                    "nn.DataParallel creates new replicas in every pass; start one process for each GPU"
                ),
            )
            return
        self._recording.watch(
            kwargs["model"],
            plain_optimizer(kwargs.get("optimizer")),
            replicated=is_replicated and trainer_names.of(args, "world_size", 1) > 1,
            sum_losses=trainer_names.of(args, "micro_batches", 1) > 1,
        )

    @contained_faults
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End an update, which is the last one if a stop is due."""
        if self._recording.requested is not None:
            control.should_training_stop = True
            control.should_save = control.should_save or self._recording.on_stop == "checkpoint"
        self._protect_checkpoints(args, state, control)
        return control

    @contained_faults
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Protect checkpoints, because the Trainer may save now."""
        self._protect_checkpoints(args, state, control)

    @contained_faults
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a checkpoint that the Trainer has saved."""
        self._set_limit(args, self._limit)
        folder, step = trainer_names.of(args, "folder"), trainer_names.of(state, "global_step")
        if folder is None or step is None:
            return
        path = Path(folder) / f"checkpoint-{step}"
        if (
            trainer_names.of(args, "saves_here", False) and path.is_dir()
        ):  # a hyperparameter search uses other folders
            self._recording.saved(path)

    @contained_faults
    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record what the Trainer logs. Evaluations are recorded by `on_evaluate`."""
        if logs is None or any(name.endswith("_runtime") for name in logs):
            return
        values = {name: value for name, value in logs.items() if name not in _TRAINING_LOSS | _IGNORED}
        norm = values.pop("grad_norm", None)
        if norm is not None and not self._sees_norm:
            values["gradient_norm"] = norm
        self._recording.log(values)

    @contained_faults
    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record an evaluation."""
        self._log_evaluated(metrics or {}, "eval")
        self._protect_checkpoints(args, state, control)

    @contained_faults
    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Record a prediction."""
        self._log_evaluated(metrics, "predict")

    @contained_faults
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the training, stopped or not."""
        if self._recording.hook is not None:
            self._set_limit(args, self._limit)
        self._recording.end()
        self._recording.end_program()

    def _protect_checkpoints(self, args: Any, state: Any, control: Any) -> None:
        """Raise the Trainer's limit of checkpoints, so that its rotation keeps possible last good ones, which are the newest."""
        if control.should_save and self._limit:
            others = 1 + self._resumed + (trainer_names.of(state, "best") is not None)
            self._set_limit(args, max(self._limit, len(self._recording.protected()) + others))

    def _set_limit(self, args: Any, limit: int | None) -> None:
        if trainer_names.have(args, "limit"):
            trainer_names.put(args, "limit", limit)

    def _log_evaluated(self, metrics: Mapping[str, Any], mode: Mode) -> None:
        """Record metrics. Those of the first data set keep their names; those of further sets are prefixed with the set's name."""
        name = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), mode)
        if name not in self._sets:
            self._sets.append(name)
        prefix = "" if name == self._sets[0] or mode == "predict" else f"{name.removeprefix('eval_')}:"
        self._recording.log(
            {
                f"{prefix}{key.removeprefix(f'{name}_')}": value
                for key, value in metrics.items()
                if key not in _IGNORED and not key.endswith(_IGNORED_SUFFIXES)
            },
            mode,
        )
