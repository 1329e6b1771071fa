"""A callback for Hugging Face's Trainer: ``Trainer(…, callbacks=[WatchstepCallback()])``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from watchstep.format.control import StopRequest
from watchstep.format.tensors import Mode
from watchstep.hook import Hook
from watchstep.integrations.recording import CallbackRecording, OnStop, contained_faults, missing

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import SaveStrategy  # noqa: F401 - absent where transformers is too old
except ImportError as error:
    missing("transformers", "transformers", error)

from watchstep.integrations.accelerate import plain_optimizer, ranks_of, replicates

_SEEN = {"loss", "train_loss"}
"""What the hook records of every step, and the Trainer the mean of."""

_NO_FIGURES = {"epoch", "total_flos", "step"}
_TIMES = ("_runtime", "_per_second", "_preparation_time")


class WatchstepCallback(TrainerCallback):  # type: ignore[misc]
    """Records a Trainer's training: what a `Hook` records, and what the Trainer logs and evaluates.

    Each ``train()`` is a run of its own; one that resumes from a checkpoint goes on with the run, at its step. The run ends
    with the training. Of the Trainer's logs the loss and the norm of gradients are left out, which are recorded of each
    step anyway; what it evaluates is in mode eval, ``eval_loss`` as ``loss``.

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
        """Record by a hook that is made when training begins.

        Args:
            store_url: as `Hook` takes it.
            hook: the program's own instead, which stays open.
            on_stop: what a stop does: nothing (``"ignore"``, the default), the Trainer's own early end (``"stop"``; the default
                under ``watchstep run``), the same with a checkpoint saved (``"checkpoint"``), or `StopTraining` (``"raise"``).
            **options: ``run``, ``project``, ``rules``, ``guard``, ``config``, ``overhead_budget``, as `Hook` takes them.

        Raises:
            ConfigError: an argument is wrong.
        """
        super().__init__()
        self._recording = CallbackRecording(store_url, hook, on_stop, options)
        self._sets: list[str] = []
        self._sees_norm = True
        self._limit: int | None = None
        self._resumed = False

    @property
    def hook(self) -> Hook | None:
        """Of the training that is under way, or of the last one."""
        return self._recording.hook

    @property
    def stopped(self) -> StopRequest | None:
        """Why the last training was stopped, where it was."""
        return self.hook.stopped if self.hook is not None else None

    def close(self) -> None:
        """End the recording of a training that an exception ended, and that the program goes on from."""
        self._recording.end()

    @contained_faults
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A training begins, or goes on from a checkpoint that has been read."""
        self._recording.begin(
            int(state.global_step), ranks_of(args.world_size, args.process_index, args.local_process_index)
        )
        self._sets = []
        self._limit = args.save_total_limit
        self._resumed = state.global_step > 0
        whole = replicates()
        self._sees_norm = whole and args.max_grad_norm > 0
        if args.n_gpu > 1:
            self._recording.fault(
                "watch",
                RuntimeError(
                    "nn.DataParallel makes new replicas in every pass; start one process for each GPU"
                ),
            )
            return
        self._recording.watch(
            kwargs["model"],
            plain_optimizer(kwargs.get("optimizer")),
            replicated=whole and args.world_size > 1,
            sum_losses=args.gradient_accumulation_steps > 1,
        )

    @contained_faults
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An update is done: where a stop is due, it is the last."""
        if self._recording.asked is not None:
            control.should_training_stop = True
            control.should_save = control.should_save or self._recording.on_stop == "checkpoint"
        self._keep_more(args, state, control)
        return control

    @contained_faults
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer may save now."""
        self._keep_more(args, state, control)

    @contained_faults
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer has saved a checkpoint."""
        args.save_total_limit = self._limit
        place = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and place.is_dir():  # a search of hyperparameters has folders of its own
            self._recording.saved(place)

    @contained_faults
    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """The Trainer logs; what it has evaluated comes by `on_evaluate`, too."""
        if logs is None or any(name.endswith("_runtime") for name in logs):
            return
        values = {name: value for name, value in logs.items() if name not in _SEEN | _NO_FIGURES}
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
        """An evaluation is done."""
        self._log_evaluated(metrics or {}, "eval")
        self._keep_more(args, state, control)

    @contained_faults
    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """A prediction is done."""
        self._log_evaluated(metrics, "predict")

    @contained_faults
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training is over, stopped or not."""
        if self._recording.hook is not None:
            args.save_total_limit = self._limit
        self._recording.end()
        self._recording.end_program()

    def _keep_more(self, args: Any, state: Any, control: Any) -> None:
        """Let the rotation that follows a checkpoint leave what may be the last good one: these are the newest."""
        if control.should_save and self._limit:
            besides = 1 + self._resumed + (state.best_model_checkpoint is not None)
            args.save_total_limit = max(self._limit, len(self._recording.protected()) + besides)

    def _log_evaluated(self, metrics: Mapping[str, Any], mode: Mode) -> None:
        """The first set's figures have their own names, those of further sets the set's before them."""
        name = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), mode)
        if name not in self._sets:
            self._sets.append(name)
        before = "" if name == self._sets[0] or mode == "predict" else f"{name.removeprefix('eval_')}:"
        self._recording.log(
            {
                f"{before}{key.removeprefix(f'{name}_')}": value
                for key, value in metrics.items()
                if key not in _NO_FIGURES and not key.endswith(_TIMES)
            },
            mode,
        )
