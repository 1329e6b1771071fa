"""The configuration of a recording: cadences, collections, probes with arguments, bounds, snapshots, system sampling.

A probe with arguments measures single elements, only where a rule or a program requests it. The name of the probe and of
its column is its kind and its arguments: ``inactive_units:1.0``. Equal arguments share a column.
"""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from watchstep.errors import BadNameError, ConfigError
from watchstep.format import tensors
from watchstep.format.layout import check_name
from watchstep.format.tensors import MODES, Mode, TensorInfo
from watchstep.platform.patterns import check_pattern, matches_from_start


@dataclass(frozen=True)
class Cadence:
    """At which steps a collection is measured, or its tensors are saved. In modes other than train, forward passes of that mode are counted.

    Full tensors of a mode without forward passes of a watched model are saved by the number of the step.

    Attributes:
        every: number of steps between measurements; None for as often as the overhead budget allows.
        start: the first step.
        stop: the first step that is excluded; None for no end.
        steps: additional steps, inside or outside of start and stop.
        modes: only in these modes; empty for all.
    """

    every: int | None = 1
    start: int = 0
    stop: int | None = None
    steps: tuple[int, ...] = ()
    modes: tuple[Mode, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.modes, str) or (unknown := [mode for mode in self.modes if mode not in MODES]):
            raise ConfigError(
                f"cadence: unknown modes {self.modes if isinstance(self.modes, str) else unknown!r}",
                f"use a tuple of {', '.join(MODES)}",
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ConfigError(
                f"cadence: invalid every={self.every}",
                "use a whole number from 1; omit the collection to never measure it",
            )

    def due(self, step: int) -> bool:
        """Whether the collection is measured at this step, as far as that does not depend on the budget."""
        every = self.every or 1
        return step in self.steps or (self.is_within(step) and (step - self.start) % every == 0)

    def is_within(self, step: int) -> bool:
        """Whether a step is between start and stop."""
        return step >= self.start and (self.stop is None or step < self.stop)

    def applies_in(self, mode: Mode) -> bool:
        """Whether it has steps of a mode."""
        return not self.modes or mode in self.modes


ADAPTIVE = Cadence(every=None)
"""As often as the overhead budget allows."""


@dataclass(frozen=True)
class TensorLimits:
    """Limits of the full tensors of a collection, in addition to the memory of all (`Snapshots.memory_bytes`).

    Attributes:
        ring_bytes: size on the store: beyond it the oldest object of the collection is deleted, unless something went wrong since. None
            keeps all.
        hour_bytes: size written within an hour. A tensor that exceeds it is not saved. None for no limit.
        rows: saves only this part of the first dimension (examples, tokens), from the first number to before the second. It applies to
            activations, inputs, outputs, labels and tensors of the program's own.
        channels: the same for the second dimension.
    """

    ring_bytes: int | None = None
    hour_bytes: int | None = None
    rows: tuple[int, int] | None = None
    channels: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, size in (("ring_bytes", self.ring_bytes), ("hour_bytes", self.hour_bytes)):
            if size is not None and (type(size) is not int or size < 1):
                raise ConfigError(
                    f"tensor limits: invalid {name}={size!r}", "use 1 or more bytes, or None for no limit"
                )
        for name, part in (("rows", self.rows), ("channels", self.channels)):
            if part is not None and not _is_part(part):
                raise ConfigError(
                    f"tensor limits: invalid {name}={part!r}", f"use a first and an end index: {name}=(0, 4)"
                )


def _is_part(part: Any) -> bool:
    is_pair = isinstance(part, tuple) and len(part) == 2 and all(type(index) is int for index in part)
    return is_pair and 0 <= part[0] < part[1]


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

MAX_CHANNELS = 4
"""Channels of an image: red, green, blue and alpha."""

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
"""Kinds of probes, and the types of their arguments.

``inactive_units:PERCENT``: units of a rectifier that are above zero for less than this percentage of the examples of a step.
``saturated_units:Tanh:LOW:HIGH:PERCENT``, and ``Sigmoid``: units whose input is between the bounds for less than this
percentage of the examples. Both also record ``units``, the number of units. ``unchanged:RTOL:ATOL:EQUAL_NAN``: 1 if all elements equal
those of the previous record, by the test of `numpy.allclose`, else 0. ``weight_change:STEPS:EPSILON``: the norm of a weight's change
since an earlier record, divided by its norm there plus epsilon. The earlier record is the oldest of the last STEPS steps, or the
last one if STEPS is 0; the value is -1 if there is none. ``token_count:TOKEN``: how often an embedding received a token;
``tokens_counted``: how many tokens it received. ``channel_sum:AXIS``: the sum of each channel of a model's images, in columns
``channel_sum:AXIS:0`` to 3. ``input_variance``: variance of a rectifier's input. ``percentile_range:STEPS``: the 95th minus the 5th
percentile of a gradient, within this number of steps from its first record. ``function_calls``: also record `torch.relu`, `torch.tanh`
and `torch.sigmoid` when a model calls them as functions; their outputs are recorded as ``MODULE:relu_0``.
"""

_SUMMED = frozenset({TOKEN_COUNT, TOKENS, CHANNEL_SUM})
_LAST = frozenset({INACTIVE_UNITS, SATURATED_UNITS, UNITS, INPUT_VARIANCE})


class ElementProbe(NamedTuple):
    """A probe's name, kind and arguments."""

    name: str
    kind: str
    arguments: tuple[str | float | int | bool, ...]


def element_probe(kind: str, *arguments: str | float) -> str:
    """Return the name of a probe with these arguments."""
    kinds = _ARGUMENTS[kind]
    texts = [str(_converted(to, argument)) for to, argument in zip(kinds, arguments, strict=True)]
    return ":".join([kind, *texts])


def parsed(name: str) -> ElementProbe | None:
    """Parse the name of a probe with arguments; None for another probe.

    Raises:
        ConfigError: the arguments do not match its kind.
    """
    kind, *words = name.split(":")
    if kind not in _ARGUMENTS:
        return None
    kinds = _ARGUMENTS[kind]
    try:
        arguments = tuple(_converted(to, word) for to, word in zip(kinds, words, strict=True))
    except ValueError as error:
        takes = ", ".join(kind.__name__ for kind in kinds) or "nothing"
        raise ConfigError(f"probe {name!r}: invalid arguments", f"{kind} takes {takes}") from error
    return ElementProbe(name, kind, arguments)


def probe_kinds() -> tuple[str, ...]:
    """Return the kinds of probes with arguments."""
    return tuple(_ARGUMENTS)


def of_kind(probes: Iterable[str], kind: str) -> list[ElementProbe]:
    """Return the probes of a kind."""
    return [probe for name in probes if (probe := parsed(name)) is not None and probe.kind == kind]


def kind_of(column: str) -> str:
    """Return the kind of a probe's column."""
    return column.partition(":")[0]


def is_summed(column: str) -> bool:
    """Whether the values of a step's passes are added."""
    return kind_of(column) in _SUMMED


def is_cumulative(column: str) -> bool:
    """Whether each pass of a step includes the earlier ones."""
    return kind_of(column) in _LAST


def _converted(to: type, value: str | float) -> str | float | int | bool:
    if to is bool:
        if str(value) not in {"True", "False"}:
            raise ValueError(value)
        return str(value) == "True"
    converted: str | float | int = to(value)
    return converted


FIGURES_ONLY = frozenset({tensors.UPDATES, tensors.CHECKSUMS, tensors.CONFUSION, tensors.NOT_IN_OPTIMIZER})
"""Collections of tensors that exist for statistics only, as samples or as single numbers."""

BUILT_IN = tensors.BUILT_IN
"""Collections with predefined tensors; selectors restrict them."""

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
    "label",
    "loss",
    "custom",
)
"""Roles that can be selected. The last three are of values that the program passes to `Hook.record`."""

STATE_ROLES = frozenset({"momentum", "second_moment", "state"})
_EXPLICIT_ROLES = STATE_ROLES | {"input", "buffer", "not_in_optimizer"}


@dataclass(frozen=True)
class Collection:
    """A named group of tensors. A tensor is measured when one of its collections is due.

    In a built-in collection, selectors restrict its tensors to those that match all of them. A collection with any other name
    is the user's own, and includes everything recordable that matches all of its selectors. It includes inputs of modules,
    optimizer state, buffers and parameters without an optimizer only if ``roles`` names them. Without selectors it contains
    the tensors that the program records with ``hook.record(collection=…)``.

    Attributes:
        cadence: how often it is measured; None for full tensors only.
        modes: cadences for other modes; None excludes a mode.
        tensors: when its tensors are saved in full; None for never. With ``every=None`` only at ``steps``.
        tensor_limits: limits of the full tensors.
        include: only names that this regular expression (RE2 syntax) matches from the start.
        exclude: excludes names that this regular expression (RE2 syntax) matches from the start.
        modules: only tensors of modules at these paths, or below them.
        module_types: only tensors of modules of these classes, by name, or of subclasses.
        roles: only tensors with these roles: weight, bias, gradient, output, input, update, ….
    """

    cadence: Cadence | None = ADAPTIVE
    modes: Mapping[Mode, Cadence | None] = field(default_factory=dict)
    tensors: Cadence | None = None
    tensor_limits: TensorLimits = TensorLimits()
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
                raise ConfigError(f"collection: {name}={words!r} is not a tuple", f"use {name}=({words!r},)")
        if unknown := set(self.roles) - set(ROLES):
            raise ConfigError(
                f"collection: unknown roles {sorted(unknown)}", f"use some of {', '.join(ROLES)}"
            )
        for pattern in (self.include, self.exclude):
            try:
                if pattern is not None:
                    check_pattern(pattern)
            except ValueError as error:
                raise ConfigError(
                    f"collection: {pattern!r} is not a valid regular expression ({error})",
                    "use RE2 syntax: https://github.com/google/re2/wiki/Syntax",
                ) from error
        for mode in self.modes:
            if mode not in MODES:
                raise ConfigError(f"collection: unknown mode {mode!r}", f"use one of {', '.join(MODES)}")
        if self.tensors is not None and self.tensors.every is None and not self.tensors.steps:
            raise ConfigError(
                "collection: tensors are saved at no step",
                "use tensors=Cadence(every=100), or Cadence(every=None, steps=(10, 20)) for these steps only",
            )

    @property
    def selects(self) -> bool:
        """Whether the collection has any selector."""
        return bool(self.include or self.exclude or self.modules or self.module_types or self.roles)

    def matches(self, info: TensorInfo, bases: Iterable[str] = ()) -> bool:
        """Whether a tensor matches every selector.

        Args:
            info: the tensor.
            bases: names of the classes of its module, including base classes.
        """
        # Patterns come last, because they take longest.
        return (
            (not self.roles or info.role in self.roles)
            and (not self.modules or any(_is_below(info.module, path) for path in self.modules))
            and (not self.module_types or not {info.module_type, *bases}.isdisjoint(self.module_types))
            and (self.include is None or matches_from_start(self.include, info.name))
            and (self.exclude is None or not matches_from_start(self.exclude, info.name))
        )

    def in_mode(self, mode: Mode) -> Cadence | None:
        """Return the cadence in a mode; None if it is not measured in that mode."""
        cadence = self.modes.get(mode, self.cadence)
        return cadence if cadence is not None and cadence.applies_in(mode) else None

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form without default values."""
        default = asdict(Collection())
        data = asdict(self)
        changed = {name: value for name, value in data.items() if value != default[name]}
        return {**changed, "cadence": data["cadence"]}


def _is_below(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def checked(collections: Mapping[str, Cadence | Collection]) -> dict[str, Collection]:
    """Return collections by name; a bare cadence becomes a collection.

    Raises:
        ConfigError: a value is not a collection, or a name is similar to a built-in one.
    """
    checked_collections = {}
    for name, value in collections.items():
        collection = Collection(value) if isinstance(value, Cadence) else value
        if not isinstance(collection, Collection):
            raise ConfigError(f"collections[{name!r}]={value!r}", "use a Cadence or a Collection")
        similar = difflib.get_close_matches(name, BUILT_IN, 1, 0.85)
        if similar and name not in BUILT_IN and not collection.selects:
            raise ConfigError(
                f"collection {name!r} is not built in and selects nothing", f"use {similar[0]!r}"
            )
        if collection.tensors is not None:
            _check_saved(name)
        checked_collections[name] = collection
    return checked_collections


def _check_saved(name: str) -> None:
    """Check that tensors of a collection can be saved in full.

    Raises:
        ConfigError: its name cannot be part of a key of the store, or its tensors are computed for statistics only.
    """
    if name in FIGURES_ONLY:
        raise ConfigError(
            f"collection {name!r}: its tensors are not saved in full", "save weights or gradients instead"
        )
    try:
        check_name("collection", name)
    except BadNameError as error:
        raise ConfigError(error.what, error.hint) from error


def placed(
    info: TensorInfo, built_in: tuple[str, ...], collections: Mapping[str, Collection], bases: Iterable[str]
) -> TensorInfo:
    """Return the tensor with the sorted names of its configured collections. A tensor without any is never recorded.

    Args:
        info: the tensor; its collections are replaced.
        built_in: the built-in collections of the tensor.
        collections: the configured collections.
        bases: names of the classes of its module, including base classes.
    """
    bases = tuple(bases)
    names = sorted(
        name
        for name, collection in collections.items()
        if (name in built_in or _may_take(name, collection, info.role)) and collection.matches(info, bases)
    )
    return replace(info, collections=tuple(names))


def _may_take(name: str, collection: Collection, role: str) -> bool:
    return (
        name not in BUILT_IN
        and collection.selects
        and (role not in _EXPLICIT_ROLES or role in collection.roles)
    )


PROBES = (
    "channels",
    "update_ratio",
    "gradient_cosine",
    "class_counts",
    "unit_spread",
    "stale_gradients",
    "token_shares",
    "example_spread",
)
"""Figures that the row does not contain, in separate columns.

``channels``: ``channels``, ``dead_channels`` (zero for every example) and ``saturated_channels`` (at a bound for every
example) of an activation module's output. ``update_ratio``: root mean square of an update divided by that of the
weight. ``gradient_cosine``: cosine of the angle to the previously measured gradient. ``class_counts``: for labels that
are classes, over all batches so far: ``labels_counted``, ``classes``, ``largest_class``, ``smallest_class``, and
the number of that class, ``rarest_class``. ``unit_spread``: for weights with equivalent units, the distance between the units,
``unit_spread``, and their movement since the first measurement, ``unit_movement``. ``stale_gradients``: the metric
``gradients:stale``, 1 at steps whose gradients contain those from before the last step. ``token_shares``: for an embedding's input,
the shares of some tokens, ``token_share``, and of the most frequent one, ``top_token_share``. ``example_spread``: for the outputs of
the first and last linear layer of each part of a model, the share of the mean square that differs between examples.
"""


_MIB = 1024 * 1024
_FIXED_BYTES = (2 * 16 + 128) * _MIB
"""Fixed part of the memory bound: samples, libraries."""

_SEGMENT_FACTOR = 4.25 * 0.5
"""Memory of encoding a segment, as a multiple of the queue's bound. Encoding takes at most 4.25 times the rows (measured:
3.4 to 4.2 times), which are 16 MiB, or those of one step, which has at most half of the queue."""


def _default_collections() -> dict[str, Cadence | Collection]:
    every_step = (tensors.LOSSES, tensors.METRICS)
    fixed = {
        # Replicas compare the same steps. Those that never agree differ after the first update.
        tensors.CHECKSUMS: Cadence(every=100, steps=(1, 2, 4, 8, 16, 32, 64)),
        tensors.BUFFERS: Cadence(every=25),  # small, and they change slowly
        tensors.NOT_IN_OPTIMIZER: Cadence(every=25),
    }
    adaptive = [name for name in BUILT_IN if name not in {*every_step, *fixed, tensors.OPTIMIZER_STATE}]
    return {
        **dict.fromkeys(every_step, Cadence()),
        **dict.fromkeys(adaptive, ADAPTIVE),
        **fixed,
    }


@dataclass(frozen=True)
class Bounds:
    """Limits that apply regardless of the store, the service and the disk.

    Attributes:
        queue_bytes: size of statistics waiting to be encoded; what exceeds it is dropped and counted.
        backlog_bytes: size of encoded objects in memory that wait for the store; beyond it, the oldest are written to disk.
        backlog_seconds: how long they wait while the store refuses; then all are written to disk, because the process may be killed.
        spill_bytes: size of encoded objects on disk; beyond it, or with 0, the queue fills.
        flush_seconds: how long statistics wait in the first minute; later 2 s or more, depending on the number of writers.
        control_seconds: interval of reading the control document from the store when no service answers.
        close_seconds: time limit for waiting for the store on close.
        term_seconds: time limit for delaying a SIGTERM to write what is left.
        checkpoint_seconds: time limit of a stop for waiting until the program saves a checkpoint (``WATCHSTEP_ON_STOP=checkpoint``);
            less than the time after which the service ends the job.
        sample_bytes: size on disk of the ids of the samples that the last steps were trained on; 0 records none.
        sample_steps: number of steps whose samples are recorded.
        stall_seconds: least time without the end of a step after which a training thread that does not move is reported; 0 never reports it.
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
    sample_bytes: int = 4 * 1024 * 1024
    sample_steps: int = 512
    stall_seconds: float = 120.0


@dataclass(frozen=True)
class Snapshots:
    """Snapshots of all weights and gradients of a step, at bad steps and on request, and the memory for full tensors.

    `Collection.tensors` saves them, and the tensors of other collections, on a cadence.

    Attributes:
        at_gate: take a snapshot at the first bad step of a series of bad steps, at most twice: the weights before that
            step's update, and its gradients.
        memory_bytes: size of the buffers of all snapshots and full tensors together. A snapshot of a larger model contains the tensors
            that fit.
    """

    at_gate: bool = True
    memory_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise ConfigError(
                f"invalid Snapshots(memory_bytes={self.memory_bytes})",
                "use a number of bytes, 0 for no snapshots and no full tensors",
            )


@dataclass(frozen=True)
class Bundles:
    """Bundles of single steps, from which a step is computed again: batches, random states, weights, buffers and optimizer state.

    A bundle is written on the training thread to a file of this machine, and uploaded in the background.

    Attributes:
        at_gate: take one at the first bad step of a series of bad steps, at most twice.
        limit_bytes: largest bundle. Of a larger step, gradients, optimizer state and weights are left out, in this order.
        reference_bytes: memory of earlier micro-batches of a step that stays referenced until the step ends.
        buffer_bytes: memory for copies of the model's buffers, made before each step for those that change.
        redact: patterns of what is left out, as ``micro_batches/*/batch``, ``program/argv`` or ``parameters/embedding*``.
    """

    at_gate: bool = True
    limit_bytes: int = 512 * 1024 * 1024
    reference_bytes: int = 64 * 1024 * 1024
    buffer_bytes: int = 16 * 1024 * 1024
    redact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("limit_bytes", "reference_bytes", "buffer_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"invalid Bundles({name}={getattr(self, name)})", "use a number of bytes, from 0"
                )
        if not isinstance(self.redact, tuple) or not all(isinstance(pattern, str) for pattern in self.redact):
            raise ConfigError(
                f"invalid Bundles(redact={self.redact!r})"[:200],
                'use a tuple of patterns: redact=("program/argv",)',
            )


@dataclass(frozen=True)
class SystemSampling:
    """How often the process and its machine are sampled, off the training thread.

    Attributes:
        seconds: interval between samples.
        row_seconds: interval that becomes one row of each figure; a shorter recording has none.
        share: share of one CPU that sampling may take; the interval is extended if it would take more.
        gpus: whether NVIDIA GPUs are sampled too, if ``watchstep[gpu]`` is installed.
    """

    seconds: float = 0.5
    row_seconds: float = 10.0
    share: float = 8e-4
    gpus: bool = True

    def __post_init__(self) -> None:
        if not 0.01 <= self.seconds <= self.row_seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"invalid SystemSampling(seconds={self.seconds}, row_seconds={self.row_seconds})",
                "use 0.01 seconds or more, and rows of at least one sample",
            )
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"invalid SystemSampling(share={self.share})", "use a share of one CPU, such as 0.001"
            )


@dataclass(frozen=True)
class CaptureConfig:
    """What to record.

    Attributes:
        collections: name → cadence, or collection with selectors; tensors without a collection are not recorded.
        overhead_budget: share of the program's own time that recording may take; it determines how often collections
            with an adaptive cadence are measured. None for no budget: these are measured at every step.
        allowance_seconds: minimum time that measuring may take of each step, for steps so short that their share pays for
            nothing; the share applies if a step takes longer than a hundred times this time.
        gate: check for NaN and infinity at every step, and measure everything of a step that has some; also measure five steps from
            a step on whose loss is far above the previous ones.
        gradients: for programs that clip gradients with `torch.nn.utils`: record them before or after clipping.
        probes: additional figures, see `PROBES`. Probes with arguments (`watchstep.capture.config`) are measured only if
            they are named here or a rule file of the hook needs them.
        token_values: tokens whose share of an embedding's input is recorded; by default the module's ``padding_idx``,
            or 0 if it has none.
        snapshots: weights and gradients at bad steps and on request, and the memory for full tensors.
        bundles: bundles of single steps; None for none.
        system: figures of the process and its machine; None for none.
        bounds: limits.
        clock: time in seconds for the budget. A custom clock makes its decisions reproducible;
            the writer thread's time is then not counted, and the system is not sampled.
    """

    collections: Mapping[str, Cadence | Collection] = field(default_factory=_default_collections)
    overhead_budget: float | None = 0.01
    allowance_seconds: float = 1e-4
    gate: bool = True
    gradients: Literal["after_clipping", "before_clipping"] = "after_clipping"
    probes: tuple[str, ...] = PROBES
    token_values: tuple[int, ...] = ()
    snapshots: Snapshots = Snapshots()
    bundles: Bundles | None = Bundles()
    system: SystemSampling | None = SystemSampling()
    bounds: Bounds = Bounds()
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        object.__setattr__(self, "collections", checked(self.collections))
        if self.gradients not in {"after_clipping", "before_clipping"}:
            raise ConfigError(
                f"invalid gradients={self.gradients!r}", 'use "after_clipping" or "before_clipping"'
            )
        if unknown := {name for name in set(self.probes) - set(PROBES) if parsed(name) is None}:
            raise ConfigError(f"unknown probes {sorted(unknown)}", f"use some of {', '.join(PROBES)}")
        if not isinstance(self.token_values, tuple) or any(
            type(value) is not int for value in self.token_values
        ):
            raise ConfigError(
                f"invalid token_values={self.token_values!r}",
                "use a tuple of whole numbers: token_values=(0,)",
            )
        budget: Any = self.overhead_budget
        if budget is not None and not (isinstance(budget, float | int) and 0 < budget <= 1):
            raise ConfigError(
                f"invalid overhead_budget={self.overhead_budget}",
                "use a share of the step's time, such as 0.01, or None",
            )

    @property
    def memory_bound(self) -> int:
        """Upper bound of the host memory in bytes that recording adds to the process, whatever the store does.

        It covers the queue and the backlog, encoding one segment, snapshots, the samples for comparing updates and gradients,
        and loaded libraries (some 100 MiB, measured). It does not cover the memory of the program itself, including
        PyTorch, and of ``Hook(tensorboard=…)``: at most 24 MiB.
        """
        bounds = self.bounds
        segment = max(68 * _MIB, int(_SEGMENT_FACTOR * bounds.queue_bytes))
        return (
            bounds.queue_bytes + bounds.backlog_bytes + segment + self.snapshots.memory_bytes + _FIXED_BYTES
        )

    @property
    def sampling(self) -> SystemSampling | None:
        """How the system is sampled; None if it is not, or with a custom clock, whose recordings must be reproducible."""
        return self.system if self.clock is time.perf_counter else None

    @property
    def chosen(self) -> Mapping[str, Collection]:
        """The collections by name."""
        return cast("Mapping[str, Collection]", self.collections)  # converted by `checked`

    @property
    def saves_tensors(self) -> bool:
        """Whether the full tensors of any collection are saved."""
        return any(collection.tensors is not None for collection in self.chosen.values())

    @property
    def keeps_state(self) -> bool:
        """Whether some collection may include optimizer state."""
        return any(
            name == tensors.OPTIMIZER_STATE or not STATE_ROLES.isdisjoint(collection.roles)
            for name, collection in self.chosen.items()
        )
