"""Recording a loop that uses Hugging Face Accelerate: ``hook = watch(accelerator, model, optimizer)``."""

from __future__ import annotations

import functools
import os
from typing import Any

from torch.optim import Optimizer

from watchstep.capture.framework_names import FrameworkName, FrameworkNames, contained, health_of
from watchstep.hook import Hook
from watchstep.integrations.recording import Ranks, check_options, missing, opened
from watchstep.stopping import OnStop

try:
    import accelerate  # noqa: F401 - whether it is installed
except ImportError as error:
    missing("accelerate", "accelerate", error)

_RANKS = "one run of all ranks"
_CHECKPOINTS = "saved checkpoints"

at = FrameworkName.at
accelerate_names = FrameworkNames(
    "Accelerate",
    {
        "state": at("checks of replicas", "accelerate.state:AcceleratorState"),
        "distributed_type": at("checks of replicas", "accelerate:*.distributed_type"),
        "broadcast": at(_RANKS, "accelerate.utils:broadcast_object_list"),
        "world_size": at(_RANKS, "accelerate:*.state.num_processes"),
        "rank": at(_RANKS, "accelerate:*.state.process_index"),
        "local_rank": at(_RANKS, "accelerate:*.state.local_process_index"),
        "micro_batches": at(
            "losses by their number of micro-batches", "accelerate:*.gradient_accumulation_steps"
        ),
        "tracker": at("values of accelerator.log", "accelerate.tracking:GeneralTracker"),
        "trackers": at("values of accelerator.log", "accelerate:*.trackers"),
        "save_state": at(_CHECKPOINTS, "accelerate:*.save_state"),
        "project": at(_CHECKPOINTS, "accelerate:*.project_configuration"),
        "is_main_process": at(_CHECKPOINTS, "accelerate:*.is_main_process"),
    },
)
"""Names of Accelerate that another version may lack: the one place where they are looked up."""

_Tracker: Any = accelerate_names.find("tracker") or object


def watch(
    accelerator: Any,
    model: Any,
    optimizer: Any = None,
    *,
    store_url: str | os.PathLike[str] | None = None,
    on_stop: OnStop | None = None,
    first_step: int = 0,
    **options: Any,
) -> Hook:
    """Record a loop on all ranks. Call it once on every rank, after ``prepare`` and ``init_trackers``.

    A step is an update of the optimizer, regardless of the number of micro-batches in ``accumulate``. The hook is also added to the
    accelerator's trackers: ``accelerator.log`` records, and ``accelerator.end_training`` closes the hook.

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: the model returned by ``prepare``.
        optimizer: the optimizer returned by ``prepare``; by default the first one that updates the model.
        store_url: as for `Hook`.
        on_stop: as for `Hook`. With ``"check"`` the loop checks ``hook.stopped`` after each update, saves a checkpoint if
            needed, and ends by itself. All ranks see the stop after the same update.
        first_step: the number of the first step, if the loop resumes from a checkpoint.
        **options: ``run``, ``project``, ``rules``, ``guard``, ``config``, ``overhead_budget``, as for `Hook`.

    Returns:
        The hook.

    Raises:
        ConfigError: an argument is invalid, or the model cannot be watched.
    """
    check_options(options)
    ranks = None
    if accelerate_names.have(accelerator, "world_size", "rank", "local_rank"):
        sizes = (accelerate_names.of(accelerator, key) for key in ("world_size", "rank", "local_rank"))
        ranks = ranks_of(*sizes)
    run = options.pop("run", None)
    hook = opened(
        ranks, run, {**options, "store_url": store_url, "on_stop": on_stop, "first_step": first_step}
    )
    accelerate_names.report_to(health_of(hook))
    with contained(hook, "Accelerate"):
        hook.watch(
            model,
            plain_optimizer(optimizer),
            loss_divisor=lambda: accelerate_names.of(accelerator, "micro_batches", 1),
        )
    with contained(hook, "Accelerate's trackers"):
        if accelerate_names.have(accelerator, "trackers") and accelerate_names.has("tracker"):
            accelerate_names.of(accelerator, "trackers").append(HookTracker(hook))
    with contained(hook, "Accelerate's checkpoints"):
        if accelerate_names.have(accelerator, "save_state", "project", "is_main_process"):
            _note_states(accelerator, hook)
    return hook


def plain_optimizer(optimizer: Any) -> Optimizer | None:
    """Return PyTorch's optimizer inside Accelerate's wrappers, which fire no hooks; None if there is none."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer if isinstance(optimizer, Optimizer) else None


def ranks_of(world_size: int, rank: int, local_rank: int) -> Ranks | None:
    """Describe this rank and its collective; None for a single rank."""
    if world_size <= 1 or not accelerate_names.has("broadcast"):
        return None
    setting = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Ranks(rank, world_size, local_rank, int(setting) if setting.isdigit() else 0, _broadcast)


def replicates() -> bool:
    """Whether each rank is known to have the whole model, neither sharded nor split. Requires an accelerator."""
    state = accelerate_names.find("state")
    if state is None:
        return False
    name = str(accelerate_names.of(state(), "distributed_type", "")).rpartition(".")[2]
    return name == "NO" or name.startswith("MULTI_")


def _note_states(accelerator: Any, hook: Hook) -> None:
    """Report saved states to the hook, and protect possible last good checkpoints from the accelerator's rotation.

    These are the newest checkpoints, so it suffices to keep more of them.
    """
    save = accelerate_names.of(accelerator, "save_state")

    @functools.wraps(save)
    def save_state(*args: Any, **kwargs: Any) -> Any:
        configuration = accelerate_names.of(accelerator, "project")
        limit = getattr(configuration, "total_limit", None)
        if limit is not None:
            configuration.total_limit = max(limit, len(hook.protected_checkpoints()) + 1)
        try:
            path = save(*args, **kwargs)
        finally:
            if limit is not None:
                configuration.total_limit = limit
        with contained(hook, "Accelerate's checkpoints"):
            if accelerate_names.of(accelerator, "is_main_process", False) and path is not None:
                hook.checkpoint_saved(path)
        return path

    accelerator.save_state = save_state


def _broadcast(pair: tuple[str, str]) -> tuple[str, str]:
    run, attempt = accelerate_names.find("broadcast")(list(pair), from_process=0)
    return run, attempt


class HookTracker(_Tracker):  # type: ignore[misc]
    """The hook, as a tracker of an accelerator."""

    name = "watchstep"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self._hook = hook

    @property
    def tracker(self) -> Hook:
        """The result of ``accelerator.get_tracker("watchstep", unwrap=True)``."""
        return self._hook

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Record numbers at the current step."""
        self._hook.log(values)

    def finish(self) -> None:
        """Close the hook, because training has ended."""
        self._hook.close()
