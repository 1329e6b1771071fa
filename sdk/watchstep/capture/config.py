"""What is recorded, how often, and within which bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from watchstep import tensors
from watchstep.capture.cadence import ADAPTIVE, Cadence
from watchstep.capture.collections import BUILT_IN, STATE_ROLES, Collection, checked
from watchstep.capture.element_probes import parsed
from watchstep.errors import ConfigError

PROBES = (
    "channels",
    "update_ratio",
    "gradient_cosine",
    "class_counts",
    "unit_spread",
    "kept_gradients",
    "token_shares",
)
"""Figures that cannot be had from the row, in columns of their own.

``channels``: of an activation module's output, ``channels``, ``dead_channels`` (zero for every example) and
``saturated_channels`` (at a bound for every example). ``update_ratio``: root mean square of an update over that of the
weight. ``gradient_cosine``: cosine of the angle to the gradient that was measured before. ``class_counts``: of labels that
are classes, over all batches looked at so far: ``labels_counted``, ``classes``, ``largest_class``, ``smallest_class``, and
which that is, ``rarest_class``. ``unit_spread``: of weights whose units are alike, how far they are apart,
``unit_spread``, and how far they have come since the first look, ``unit_movement``. ``kept_gradients``: the metric
``gradients:kept``, 1 at steps whose gradients hold those of before the last step. ``token_shares``: of an embedding's output,
the shares of some tokens, ``token_share``, and of the most frequent one, ``top_token_share``, in what it was given.
"""


_MIB = 1024 * 1024
_BESIDES = (2 * 16 + 128) * _MIB
"""Of the memory bound: samples, libraries."""

_SEGMENT = 4.25 * 0.5
"""Of the memory bound, as a share of the queue's: a segment while it is made. That takes 4.25 times its rows at most (measured:
3.4 to 4.2 times), which are 16 MiB, or those of one step, which has half of the queue at most."""


def _default_collections() -> dict[str, Cadence | Collection]:
    every_step = (tensors.LOSSES, tensors.METRICS)
    fixed = {
        tensors.CHECKSUMS: Cadence(every=100),  # replicas compare the same steps
        tensors.BUFFERS: Cadence(every=25),  # small, and what they tell shows slowly
        tensors.UNHELD: Cadence(every=25),
    }
    left = [name for name in BUILT_IN if name not in {*every_step, *fixed, tensors.OPTIMIZER_STATE}]
    return {
        **dict.fromkeys(every_step, Cadence()),
        **dict.fromkeys(left, ADAPTIVE),
        **fixed,
    }


@dataclass(frozen=True)
class Bounds:
    """Limits that hold whatever the store, the service or the disk do.

    Attributes:
        queue_bytes: statistics waiting to be encoded; what comes beyond is dropped and counted.
        backlog_bytes: encoded objects that wait in memory for the store; beyond, the oldest go to disk.
        backlog_seconds: how long they do so while the store refuses; then all go to disk, for the process may be killed.
        spill_bytes: encoded objects that wait on disk; beyond, or with 0, the queue is left to fill.
        flush_seconds: how long statistics wait in the first minute; later 2 s and more with the number of writers.
        control_seconds: how often the control document is looked for on the store when no service answers.
        close_seconds: the longest that closing waits for the store.
        term_seconds: the longest that a SIGTERM is put off to write what is left.
        checkpoint_seconds: the longest that a stop waits for the program to save a checkpoint (``WATCHSTEP_ON_STOP=checkpoint``);
            less than the time after which the service ends the job.
    """

    queue_bytes: int = 64 * 1024 * 1024
    backlog_bytes: int = 64 * 1024 * 1024
    backlog_seconds: float = 10.0
    spill_bytes: int = 1024 * 1024 * 1024
    flush_seconds: float = 1.0
    control_seconds: float = 5.0
    close_seconds: float = 10.0
    term_seconds: float = 5.0
    checkpoint_seconds: float = 20.0


@dataclass(frozen=True)
class Snapshots:
    """When full tensors of weights and gradients are kept, and within which bounds.

    Attributes:
        every: each so many steps; None for at the gate and on request only.
        at_gate: at the first bad step of a run of bad steps, twice at most: the weights as they were before that
            step's update, and its gradients.
        memory_bytes: all buffers of snapshots together. Of a larger model a snapshot holds the tensors that fit.
        ring_bytes: on the store, for snapshots of the cadence: over it the oldest is deleted, unless something went
            wrong since. None keeps all.
        compress: without loss, where it saves a tenth; takes processor time beside training.
    """

    every: int | None = None
    at_gate: bool = True
    memory_bytes: int = 256 * 1024 * 1024
    ring_bytes: int | None = None
    compress: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(
                f"Snapshots(every={self.every})", "use 1 or more, or None for at the gate and on request only"
            )
        if self.memory_bytes < 0:
            raise ConfigError(
                f"Snapshots(memory_bytes={self.memory_bytes})", "use a number of bytes, 0 for no snapshots"
            )
        if self.ring_bytes is not None and self.ring_bytes < 1:
            raise ConfigError(
                f"Snapshots(ring_bytes={self.ring_bytes})", "use 1 or more, or None to keep all"
            )


@dataclass(frozen=True)
class SystemSampling:
    """How often the process and its machine are looked at, off the training thread.

    Attributes:
        seconds: from sample to sample.
        row_seconds: samples of so long become one row of each figure; a recording that is shorter has none.
        share: of one CPU that samples may take; where they would take more, they are taken more rarely.
        gpus: whether NVIDIA's GPUs are sampled too, where ``watchstep[gpu]`` is installed.
    """

    seconds: float = 0.5
    row_seconds: float = 10.0
    share: float = 8e-4
    gpus: bool = True

    def __post_init__(self) -> None:
        if not 0.01 <= self.seconds <= self.row_seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"SystemSampling(seconds={self.seconds}, row_seconds={self.row_seconds})",
                "use 0.01 seconds or more, and rows of at least one sample",
            )
        if not 0 < self.share <= 1:
            raise ConfigError(f"SystemSampling(share={self.share})", "use a share of one CPU, such as 0.001")


@dataclass(frozen=True)
class CaptureConfig:
    """What to record.

    Attributes:
        collections: name → cadence, or collection with selectors; what no collection holds is not recorded.
        overhead_budget: share of the program's own time that recording may take; it decides how often collections
            with an adaptive cadence are measured. None for no budget: these are then measured at every step.
        allowance_seconds: that measuring may take of each step at least, for steps so short that their share pays for
            nothing; the share decides where a step takes longer than a hundred times that.
        gate: look for NaN and infinity at every step, and measure everything of a step that has some; and of five steps from one
            on whose loss is far above those before.
        gradients: where a program clips gradients by `torch.nn.utils`: as they were before it, or are after it.
        probes: figures besides the row, see `PROBES`; those of `watchstep.capture.element_probes`, which take arguments, only where
            they are named here or a rule file that the hook is given needs them.
        token_values: the tokens whose share of an embedding's input is told; the module's ``padding_idx`` where there are
            none, or 0 where it has none.
        snapshots: full tensors of weights and gradients.
        system: figures of the process and its machine; None for none.
        bounds: limits.
        clock: seconds by which the budget times itself; another one makes its decisions reproducible;
            what the writer's thread takes is then not counted, and the system not sampled.
    """

    collections: Mapping[str, Cadence | Collection] = field(default_factory=_default_collections)
    overhead_budget: float | None = 0.01
    allowance_seconds: float = 1e-4
    gate: bool = True
    gradients: Literal["after_clipping", "before_clipping"] = "after_clipping"
    probes: tuple[str, ...] = PROBES
    token_values: tuple[int, ...] = ()
    snapshots: Snapshots = Snapshots()
    system: SystemSampling | None = SystemSampling()
    bounds: Bounds = Bounds()
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        object.__setattr__(self, "collections", checked(self.collections))
        if self.gradients not in {"after_clipping", "before_clipping"}:
            raise ConfigError(f"gradients={self.gradients!r}", 'use "after_clipping" or "before_clipping"')
        if unknown := {name for name in set(self.probes) - set(PROBES) if parsed(name) is None}:
            raise ConfigError(f"probes: {sorted(unknown)} unknown", f"use some of {', '.join(PROBES)}")
        if not isinstance(self.token_values, tuple) or any(type(one) is not int for one in self.token_values):
            raise ConfigError(f"token_values={self.token_values!r}", "give whole numbers: token_values=(0,)")
        budget: Any = self.overhead_budget
        if budget is not None and not (isinstance(budget, float | int) and 0 < budget <= 1):
            raise ConfigError(
                f"overhead_budget={self.overhead_budget}",
                "use a share of the step's time, such as 0.01, or None",
            )

    @property
    def memory_bound(self) -> int:
        """Bytes of memory that recording adds to the process at most, whatever the store does; on the host.

        The queue and the backlog, one segment while it is made, snapshots, the samples that updates and gradients are
        compared by, and what libraries take when they are loaded (some 100 MiB, measured). The memory of the program itself, PyTorch
        included, is not in it.
        """
        bounds = self.bounds
        segment = max(68 * _MIB, int(_SEGMENT * bounds.queue_bytes))
        return bounds.queue_bytes + bounds.backlog_bytes + segment + self.snapshots.memory_bytes + _BESIDES

    @property
    def sampling(self) -> SystemSampling | None:
        """How the system is sampled; None where it is not: what is reproducible by its clock shall not depend on time."""
        return self.system if self.clock is time.perf_counter else None

    @property
    def chosen(self) -> Mapping[str, Collection]:
        """The collections by name."""
        return cast("Mapping[str, Collection]", self.collections)  # made so when it was checked

    @property
    def keeps_state(self) -> bool:
        """Whether some collection may hold what optimizers keep for a parameter."""
        return any(
            name == tensors.OPTIMIZER_STATE or not STATE_ROLES.isdisjoint(collection.roles)
            for name, collection in self.chosen.items()
        )
