"""The configuration of a recording: cadences, collections, probes with arguments, bounds, snapshots, system sampling.

A probe with arguments measures single elements, only where a rule or a program requests it. The name of the probe and of
its column is its kind and its arguments: ``inactive_units:1.0``. Equal arguments share a column.
"""

from __future__ import annotations

import difflib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from watchstep.errors import ConfigError
from watchstep.format import tensors
from watchstep.format.tensors import MODES, Mode, TensorInfo


@dataclass(frozen=True)
class Cadence:
    """At which steps a collection is measured. In other modes than train, forward passes of that mode are counted.

    Attributes:
        every: each so many steps; None for as often as the overhead budget allows.
        start: the first step.
        stop: the first step no more; None for no end.
        steps: these steps besides, whether within start and stop or not.
    """

    every: int | None = 1
    start: int = 0
    stop: int | None = None
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ConfigError(
                f"cadence: every={self.every}",
                "use a whole number from 1; leave the collection out for never",
            )

    def due(self, step: int) -> bool:
        """Whether the collection is measured at this step, where that does not depend on the budget."""
        every = self.every or 1
        return step in self.steps or (self.within(step) and (step - self.start) % every == 0)

    def within(self, step: int) -> bool:
        """Whether the step lies between start and stop."""
        return step >= self.start and (self.stop is None or step < self.stop)


ADAPTIVE = Cadence(every=None)
"""As often as the overhead budget allows."""


INACTIVE_UNITS = "inactive_units"
SATURATED_UNITS = "saturated_units"
UNITS = "units"
UNCHANGED = "unchanged"
WEIGHT_CHANGE = "weight_change"
TOKEN_COUNT = "token_count"  # noqa: S105 - no password
TOKENS = "tokens_counted"
CHANNEL_SUM = "channel_sum"
INPUT_VARIANCE = "input_variance"
PERCENTILE_RANGE = "percentile_range"
FUNCTION_CALLS = "function_calls"

MOST_CHANNELS = 4
"""Of an image: red, green, blue and alpha."""

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    INACTIVE_UNITS: (float,),
    SATURATED_UNITS: (str, float, float, float),
    UNCHANGED: (float, float, bool),
    WEIGHT_CHANGE: (int, float),
    TOKEN_COUNT: (int,),
    CHANNEL_SUM: (int,),
    INPUT_VARIANCE: (),
    PERCENTILE_RANGE: (int,),
    FUNCTION_CALLS: (),
}
"""The kinds, and what their arguments are.

``inactive_units:PERCENT``: of a rectifier, units that are above zero for less than so many percent of the examples of a step.
``saturated_units:Tanh:LOW:HIGH:PERCENT``, and ``Sigmoid``: units whose input lies between the bounds for less than so many
percent of the examples. Beside both, ``units``: how many there are. ``unchanged:RTOL:ATOL:EQUAL_NAN``: 1 where all elements are
those of the record before, by the test of `numpy.allclose`, else 0. ``weight_change:STEPS:EPSILON``: the norm of the change of a
weight since an earlier record over its norm there plus epsilon; the earlier record is the oldest of the last STEPS steps, or the
last one where STEPS is 0; -1 where there is none. ``token_count:TOKEN``: how often an embedding was given a token; ``tokens_counted``, how many tokens it
was given. ``channel_sum:AXIS``: of a model's images, the sum of each channel, in columns ``channel_sum:AXIS:0`` to 3.
``input_variance``: of what goes into a rectifier. ``percentile_range:STEPS``: of a gradient, within so many steps of its first
record, the 95th percentile less the 5th. ``function_calls``: also look at `torch.relu`, `torch.tanh` and `torch.sigmoid` where a
model calls them as functions; their outputs are then recorded as ``MODULE:relu_0``.
"""

_SUMMED = frozenset({TOKEN_COUNT, TOKENS, CHANNEL_SUM})
_LAST = frozenset({INACTIVE_UNITS, SATURATED_UNITS, UNITS, INPUT_VARIANCE})


class ElementProbe(NamedTuple):
    """One probe: its name, its kind, and its arguments."""

    name: str
    kind: str
    arguments: tuple[str | float | int | bool, ...]


def element_probe(kind: str, *arguments: str | float) -> str:
    """The name of a probe of a kind with these arguments."""
    kinds = _ARGUMENTS[kind]
    given = [str(_converted(to, argument)) for to, argument in zip(kinds, arguments, strict=True)]
    return ":".join([kind, *given])


def parsed(name: str) -> ElementProbe | None:
    """The probe of that name; None where it is of another sort.

    Raises:
        ConfigError: the arguments are not those of its kind.
    """
    kind, *words = name.split(":")
    if kind not in _ARGUMENTS:
        return None
    kinds = _ARGUMENTS[kind]
    try:
        arguments = tuple(_converted(to, word) for to, word in zip(kinds, words, strict=True))
    except ValueError as error:
        takes = ", ".join(kind.__name__ for kind in kinds) or "nothing"
        raise ConfigError(f"probe {name!r}: its arguments are wrong", f"{kind} takes {takes}") from error
    return ElementProbe(name, kind, arguments)


def of_kind(probes: Iterable[str], kind: str) -> list[ElementProbe]:
    """Those of a kind."""
    return [probe for name in probes if (probe := parsed(name)) is not None and probe.kind == kind]


def kind_of(column: str) -> str:
    """The kind of a probe's column."""
    return column.partition(":")[0]


def is_summed(column: str) -> bool:
    """Whether the passes of one step add up."""
    return kind_of(column) in _SUMMED


def counts_on(column: str) -> bool:
    """Whether each pass of a step has taken in those before it."""
    return kind_of(column) in _LAST


def _converted(to: type, value: str | float) -> str | float | int | bool:
    if to is bool:
        if str(value) not in {"True", "False"}:
            raise ValueError(value)
        return str(value) == "True"
    converted: str | float | int = to(value)
    return converted


BUILT_IN = (
    tensors.WEIGHTS,
    tensors.BIASES,
    tensors.GRADIENTS,
    tensors.ACTIVATIONS,
    tensors.OPTIMIZER_STATE,
    tensors.UPDATES,
    tensors.LOSSES,
    tensors.METRICS,
    tensors.INPUTS,
    tensors.OUTPUTS,
    tensors.LABELS,
    tensors.CUSTOM,
    tensors.CHECKSUMS,
    tensors.BUFFERS,
    tensors.NOT_IN_OPTIMIZER,
    tensors.CONFUSION,
)
"""Collections whose tensors are known without selectors; selectors make them smaller."""

ROLES = (
    "weight",
    "bias",
    "gradient",
    "output",
    "input",
    "update",
    "momentum",
    "second_moment",
    "state",
    "checksum",
    "buffer",
    "not_in_optimizer",
)
"""Roles of what can be selected."""

STATE_ROLES = frozenset({"momentum", "second_moment", "state"})
_ASKED_FOR = STATE_ROLES | {"input", "buffer", "not_in_optimizer"}


@dataclass(frozen=True)
class Collection:
    """A named group of tensors. A tensor is measured when one of its collections is due.

    Of a built-in collection, selectors keep those of its tensors that meet all of them. A collection of any other name
    is the user's own, and takes from everything that can be recorded what meets all its selectors; inputs of modules,
    the optimizer's state, buffers and what no optimizer holds only where ``roles`` names them. Without selectors it holds
    what the program gives it by ``hook.record(collection=…)``.

    Attributes:
        cadence: how often it is measured.
        modes: another cadence in a mode; None for not in that mode.
        include: only names that this regular expression matches from the start.
        exclude: not names that this regular expression matches from the start.
        modules: only tensors of modules at these paths, or below them.
        module_types: only tensors of modules of these classes, by name, or of classes derived from them.
        roles: only tensors of these roles: weight, bias, gradient, output, input, update, ….
    """

    cadence: Cadence = ADAPTIVE
    modes: Mapping[Mode, Cadence | None] = field(default_factory=dict)
    include: str | None = None
    exclude: str | None = None
    modules: tuple[str, ...] = ()
    module_types: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, words in (
            ("modules", self.modules),
            ("module_types", self.module_types),
            ("roles", self.roles),
        ):
            if isinstance(words, str):
                raise ConfigError(f"collection: {name}={words!r}", f"give a tuple: {name}=({words!r},)")
        if unknown := set(self.roles) - set(ROLES):
            raise ConfigError(f"collection: roles {sorted(unknown)}", f"use some of {', '.join(ROLES)}")
        for pattern in (self.include, self.exclude):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ConfigError(
                    f"collection: {pattern!r} is no regular expression ({error})", "see the re module"
                ) from error
        for mode in self.modes:
            if mode not in MODES:
                raise ConfigError(f"collection: mode {mode!r}", f"use one of {', '.join(MODES)}")

    @property
    def selects(self) -> bool:
        """Whether it has any selector."""
        return bool(self.include or self.exclude or self.modules or self.module_types or self.roles)

    def holds(self, info: TensorInfo, bases: Iterable[str] = ()) -> bool:
        """Whether a tensor meets every selector.

        Args:
            info: the tensor.
            bases: names of the classes that its module's class derives from, its own included.
        """
        return (
            (self.include is None or re.match(self.include, info.name) is not None)
            and (self.exclude is None or re.match(self.exclude, info.name) is None)
            and (not self.roles or info.role in self.roles)
            and (not self.modules or any(_lies_in(info.module, path) for path in self.modules))
            and (not self.module_types or not {info.module_type, *bases}.isdisjoint(self.module_types))
        )

    def in_mode(self, mode: Mode) -> Cadence | None:
        """The cadence in a mode; None where it is not measured in it."""
        return self.modes.get(mode, self.cadence)

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form; what was left at its default is left out."""
        default = Collection()
        changed = {name: value for name, value in asdict(self).items() if value != getattr(default, name)}
        return {**changed, "cadence": asdict(self.cadence)}


def _lies_in(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def checked(collections: Mapping[str, Cadence | Collection]) -> dict[str, Collection]:
    """Collections by name, a bare cadence made a collection of it.

    Raises:
        ConfigError: one is no collection, or of a name that is nearly a built-in one's.
    """
    checked_collections = {}
    for name, given in collections.items():
        collection = Collection(given) if isinstance(given, Cadence) else given
        if not isinstance(collection, Collection):
            raise ConfigError(f"collections[{name!r}]={given!r}", "give a Cadence or a Collection")
        meant = difflib.get_close_matches(name, BUILT_IN, 1, 0.85)
        if meant and name not in BUILT_IN and not collection.selects:
            raise ConfigError(f"collection {name!r} is not built in and selects nothing", f"use {meant[0]!r}")
        checked_collections[name] = collection
    return checked_collections


def placed(
    info: TensorInfo, built_in: tuple[str, ...], collections: Mapping[str, Collection], bases: Iterable[str]
) -> TensorInfo:
    """The tensor with the configured collections that it belongs to, sorted; with none it is never recorded.

    Args:
        info: the tensor; what it says of collections is replaced.
        built_in: the built-in collections whose tensor it is.
        collections: as configured.
        bases: names of the classes that its module's class derives from.
    """
    bases = tuple(bases)
    names = sorted(
        name
        for name, collection in collections.items()
        if collection.holds(info, bases) and (name in built_in or _may_take(name, collection, info.role))
    )
    return replace(info, collections=tuple(names))


def _may_take(name: str, collection: Collection, role: str) -> bool:
    return (
        name not in BUILT_IN and collection.selects and (role not in _ASKED_FOR or role in collection.roles)
    )


PROBES = (
    "channels",
    "update_ratio",
    "gradient_cosine",
    "class_counts",
    "unit_spread",
    "stale_gradients",
    "token_shares",
)
"""Figures that cannot be had from the row, in columns of their own.

``channels``: of an activation module's output, ``channels``, ``dead_channels`` (zero for every example) and
``saturated_channels`` (at a bound for every example). ``update_ratio``: root mean square of an update over that of the
weight. ``gradient_cosine``: cosine of the angle to the gradient that was measured before. ``class_counts``: of labels that
are classes, over all batches looked at so far: ``labels_counted``, ``classes``, ``largest_class``, ``smallest_class``, and
which that is, ``rarest_class``. ``unit_spread``: of weights whose units are alike, how far they are apart,
``unit_spread``, and how far they have come since the first look, ``unit_movement``. ``stale_gradients``: the metric
``gradients:stale``, 1 at steps whose gradients hold those of before the last step. ``token_shares``: of an embedding's output,
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
        tensors.NOT_IN_OPTIMIZER: Cadence(every=25),
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
    """

    every: int | None = None
    at_gate: bool = True
    memory_bytes: int = 256 * 1024 * 1024
    ring_bytes: int | None = None

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
        probes: figures besides the row, see `PROBES`; those of `watchstep.capture.config`, which take arguments, only where
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
        if not isinstance(self.token_values, tuple) or any(
            type(value) is not int for value in self.token_values
        ):
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
