"""The rule contract: ``(params, state, context, block, now) → (state, findings)``, with no other input.

**Split invariance.** The same rows, watermarks and ticks, in blocks of any size, give the same findings. A backtest is therefore equal
to the live run, and a restart is harmless. A rule is split invariant if it uses only rows that its ``lookback`` covers, and carries
everything older in its state.

**Findings** are `Finding` objects. A segment may hold hundreds of thousands of bad rows, while an alert needs only the findings at which
it begins and those that it names. `FindingRows` holds findings in columns and builds each one on access.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, field_validator

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, Mode, TensorInfo

Merge = Literal["per_worker", "sealed"]
Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""The least severe first."""


class Params(BaseModel):
    """Parameters of a rule. Unknown names are refused; the JSON schema drives API, CLI and forms."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class State(BaseModel):
    """What a rule remembers between blocks, at most 128 bytes a tensor, kept as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


P = TypeVar("P", bound=Params)
S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Needs:
    """What a rule must be given.

    Attributes:
        collections: it judges tensors of these; the default scope; empty for all.
        roles: narrowed to these roles; empty for all.
        probes: extra columns that capture must add.
        about: roles that findings are about; the others are evidence, which a rule config's ``tensors`` does not narrow.
            Empty for all.
        evidence: collections whose tensors are evidence as well, whatever their role.
        metrics: metrics of the recorder that are evidence as well, of any watched model: given whatever the scope.
        evidence_rows: earlier rows of evidence that the context holds, of each series; None for as many as the lookback. A
            rule that looks back far on losses, and remembers what it needs of all weights, keeps most rows from being kept.
        histograms: it looks into the rows' histograms. Where no rule of a run does they are not read: to look into them is
            an error then.
    """

    collections: tuple[str, ...]
    roles: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    evidence_rows: int | None = None
    histograms: bool = False

    @property
    def has_evidence(self) -> bool:
        """Whether some tensors may be evidence."""
        return bool(self.about or self.evidence or self.metrics)

    def is_evidence(self, info: TensorInfo) -> bool:
        """Whether a tensor is only held beside those that are judged."""
        by_role = bool(self.about) and info.role not in self.about
        return (
            by_role
            or any(name in info.collections for name in self.evidence)
            or any(is_metric(info, name) for name in self.metrics)
        )

    def earlier_rows(self, info: TensorInfo, lookback: int) -> int:
        """How many earlier rows of a tensor's series the context holds, by the rule's lookback."""
        if self.evidence_rows is None or not self.is_evidence(info):
            return lookback
        return min(self.evidence_rows, lookback)


def is_metric(info: TensorInfo, name: str) -> bool:
    """Whether a tensor is a metric of the recorder's with this name, of any watched model."""
    return info.role == "metric" and (info.name == name or info.name.endswith(f".{name}"))


class Advice(NamedTuple):
    """What is said with a finding of what usually causes it, and what to try; each the likeliest first."""

    usual_causes: tuple[str, ...]
    what_to_try: tuple[str, ...]


class Rule(ABC, Generic[P, S]):
    """A check over statistics. A subclass is one small file; instances hold nothing.

    Attributes:
        name: how users call it.
        summary: one line for lists.
        version: grows when the state's meaning changes; older state is rebuilt from lookback.
        needs: what it judges.
        merge: ``per_worker``: rows are judged as each worker's arrive, and NaN never waits for a dead rank;
            ``sealed``: a step is judged once, when all live workers passed it, with disjoint shards merged.
        clock: it is judged at every stored tick, also where no row came: a rule about silence.
        usual_causes: what most often makes it fire, the likeliest first; said with a finding, and never as certain.
        what_to_try: against each of these, in the same order of likelihood.
        cannot_distinguish: sound trainings that it may take for a fault, and faults that it may miss, by their nature.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    version: ClassVar[int] = 1
    needs: ClassVar[Needs]
    merge: ClassVar[Merge]
    clock: ClassVar[bool] = False
    usual_causes: ClassVar[tuple[str, ...]] = ()
    what_to_try: ClassVar[tuple[str, ...]] = ()
    cannot_distinguish: ClassVar[tuple[str, ...]] = ()
    params_type: type[P]
    state_type: type[S]
    type_arguments: ClassVar[tuple[Any, ...]] = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Take ``params_type`` and ``state_type`` from the type arguments: ``class Loud(Rule[LoudParams, State])``.

        A rule without type arguments has no parameters and no state.
        """
        super().__init_subclass__(**arguments)
        for base in cls.__dict__.get("__orig_bases__", ()):
            generic = get_origin(base)
            if isinstance(generic, type) and issubclass(generic, Rule):
                parameters = getattr(generic, "__parameters__", ())
                given = dict(zip(parameters, get_args(base), strict=True))
                declared = generic.type_arguments or parameters  # a rule may have a generic base class
                cls.type_arguments = tuple(given.get(name, name) for name in declared)
        arguments_of = cls.type_arguments or (Params, State)
        for name, argument in zip(("params_type", "state_type"), arguments_of, strict=True):
            if name not in cls.__dict__:
                setattr(cls, name, argument.__bound__ if isinstance(argument, TypeVar) else argument)

    def lookback(self, params: P) -> int:
        """How many earlier rows of each series (tensor, worker, mode) the context must hold."""
        return 0

    def needed(self, params: P) -> Needs:
        """What it must be given, with these parameters."""
        return self.needs

    def merged(self, params: P) -> Merge:
        """How it takes workers, with these parameters."""
        return self.merge

    def due_ns(self, params: P, state: S) -> int | None:
        """When it wants a tick though no row comes, nanoseconds since the epoch; None where it waits for rows."""
        return None

    def problem(self, state: S) -> str:
        """Which rows it could not judge though it went on, and why; nothing where it judged all. Told as its health."""
        return ""

    def conclusive(self, params: P, block: Block) -> NDArray[np.bool_]:
        """Which rows can show that the rule's condition does not hold; bool, shape (n,).

        A row without a finding counts towards the resolution of an alert, and ends a streak of findings, only where it is
        conclusive. The others count for nothing, as if they had not come. A row's own figures decide, and no other row. By default a
        row is conclusive where its tensor has a finite element.
        """
        return block.statistics.finite > 0

    def advice(self, finding: Finding) -> Advice:
        """The usual causes and what to try, the likeliest for this finding first."""
        return Advice(self.usual_causes, self.what_to_try)

    @abstractmethod
    def evaluate(
        self, params: P, state: S, context: Block, block: Block, now: int
    ) -> tuple[S, Sequence[Finding]]:
        """Judge a block.

        Args:
            params: as configured.
            state: as the last call returned it; a new one at the start of an attempt.
            context: the last ``lookback`` rows of each series before the block; of evidence as ``needs`` say.
            block: rows not judged before, steps ascending within each series; whole steps if ``sealed``.
            now: the stored clock tick of this evaluation, nanoseconds since the epoch.

        Returns:
            The state for the next call, and findings in the order of the rows; as `FindingRows` where there may be very many.
        """


AnyRule = Rule[Any, Any]


_PHASES = {"weight": 0, "bias": 0, "input": 1, "output": 1, "loss": 2, "gradient": 3}


class Finding(BaseModel):
    """One hit of a rule.

    Attributes:
        rule: the rule's name.
        step: the step that was judged.
        mode: its mode.
        worker: the rank whose row was judged; the number of the replica where shards were merged.
        tensor: the tensor's name; empty for a finding about the run as a whole.
        module: path of the module that owns it, empty where none does.
        module_type: the module's class.
        role: what the tensor is to it: weight, gradient, output, loss, …
        value: what was seen.
        threshold: what it was held against.
        message: both in words, with the unit.
        time_ns: when the row was taken, nanoseconds since the epoch.
        cause_rank: orders the findings of one step by the way data flows: weights, forward, loss, backward.
        upstream: tensors that data came through before, and that were seen to be bad at this step, though they are no finding by
            themselves; the message tells of them.
        origin: of NaN and infinity, the output that was the first in the order of execution to hold some, as far as outputs of this
            step, mode and worker were recorded; empty where none did, or where only the input was bad.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    rule: str
    step: int
    mode: Mode
    worker: int
    tensor: str
    module: str
    module_type: str
    role: str = ""
    value: float
    threshold: float
    message: str
    time_ns: int
    cause_rank: tuple[int, int]
    upstream: tuple[str, ...] = ()
    origin: str = ""

    @field_validator("message")
    @classmethod
    def _can_be_kept(cls, value: str) -> str:
        """Databases take no NUL in a text, and a rule of a user's own may say anything."""
        return value.replace("\0", "\ufffd")


def cause_rank(info: TensorInfo) -> tuple[int, int]:
    """Where a tensor stands in one step's flow of data; what is lower can be the cause of what is higher.

    A step reads its weights, computes outputs in module order, then the loss, then gradients in reverse module order.
    """
    phase = _PHASES.get(info.role, len(_PHASES))
    return phase, -info.order if info.role == "gradient" else info.order


Likelihood = tuple[int, tuple[int, int], int]
"""Step, cause rank and worker: what is lower is the likelier cause."""


def likelihood(finding: Finding) -> Likelihood:
    """Orders findings: what comes first is the likelier cause. By step, then as data flows, then by rank."""
    return finding.step, finding.cause_rank, finding.worker


def finding_at(rule: str, block: Block, row: int, *, value: float, threshold: float, message: str) -> Finding:
    """A finding about one row of a block."""
    info = block.info(row)
    return Finding(
        rule=rule,
        step=int(block.step[row]),
        mode=block.mode_name(row),
        worker=int(block.worker[row]),
        tensor=info.name,
        module=info.module,
        module_type=info.module_type,
        role=info.role,
        value=value,
        threshold=threshold,
        message=message,
        time_ns=int(block.time_ns[row]),
        cause_rank=cause_rank(info),
    )


def finding_of_run(
    rule: str, step: int, now: int, *, value: float, threshold: float, message: str
) -> Finding:
    """A finding about the run as a whole, which no row shows.

    Args:
        rule: the rule's name.
        step: the last step that was seen.
        now: the tick of the evaluation, nanoseconds since the epoch.
        value: what was seen.
        threshold: what it was held against.
        message: both in words.
    """
    return Finding(
        rule=rule,
        step=step,
        mode="global",
        worker=0,
        tensor="",
        module="",
        module_type="",
        value=value,
        threshold=threshold,
        message=message,
        time_ns=now,
        cause_rank=(len(_PHASES), 0),
    )


@dataclass(frozen=True)
class Hits:
    """Rows with a finding, in columns of shape (n,).

    Attributes:
        rows: places in the block, ascending.
        values: what was seen in each.
        thresholds: what it was held against.
        is_first: findings that come before all others of their phase as data flows; None for none.
    """

    rows: NDArray[np.intp]
    values: Floats
    thresholds: Floats
    is_first: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: NDArray[np.intp]) -> Hits:
        """Some of them, in that order."""
        is_first = None if self.is_first is None else self.is_first[places]
        return Hits(self.rows[places], self.values[places], self.thresholds[places], is_first)


class FindingRows(Sequence[Finding]):
    """n findings, one for each of some rows of a block; equal to any sequence of the same findings."""

    def __init__(
        self,
        rule: str,
        block: Block,
        hits: Hits,
        words: Callable[[int, float, float], str],
        finish: Callable[[Finding, int], Finding] | None = None,
    ) -> None:
        """Take columns; nothing is built yet.

        Args:
            rule: the rule's name.
            block: the judged rows.
            hits: those with a finding.
            words: the message, by row of the block, value and threshold.
            finish: what more is said of a finding, by its row of the block; it leaves ``cause_rank`` as it is.
        """
        self._rule, self._block, self._hits = rule, block, hits
        self._words, self._finish = words, finish

    @property
    def steps(self) -> NDArray[np.int64]:
        """The step of each, shape (n,)."""
        steps: NDArray[np.int64] = self._block.step[self._hits.rows]
        return steps

    def series(self) -> tuple[list[tuple[str, int, str]], NDArray[np.int64]]:
        """Tensor, worker and mode of each series, in the order in which they come first; and of each finding which it is, shape (n,)."""
        block, rows = self._block, self._hits.rows
        key = block.series_key()[rows]
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        named = [
            (block.info(row).name, int(block.worker[row]), MODES[block.mode[row]])
            for row in rows[first[order]].tolist()
        ]
        return named, place[which]

    def likelihood(self, place: int) -> Likelihood:
        """That of one finding, as `watchstep_rules.rule.likelihood` gives it; the finding is not built."""
        row = int(self._hits.rows[place])
        return int(self._block.step[row]), self._rank(place), int(self._block.worker[row])

    def take(self, places: NDArray[np.intp]) -> FindingRows:
        """Some of them, in that order."""
        return FindingRows(self._rule, self._block, self._hits.take(places), self._words, self._finish)

    def __len__(self) -> int:
        return len(self._hits)

    @overload
    def __getitem__(self, place: int) -> Finding: ...

    @overload
    def __getitem__(self, place: slice) -> FindingRows: ...

    def __getitem__(self, place: int | slice) -> Finding | FindingRows:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        hits = self._hits
        row, value, threshold = (
            int(hits.rows[place]),
            float(hits.values[place]),
            float(hits.thresholds[place]),
        )
        message = self._words(row, value, threshold)
        finding = finding_at(self._rule, self._block, row, value=value, threshold=threshold, message=message)
        if self._is_first(place):
            finding = finding.model_copy(update={"cause_rank": self._rank(place)})
        return finding if self._finish is None else self._finish(finding, row)

    def __iter__(self) -> Iterator[Finding]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"FindingRows({self._rule!r}, {len(self)} findings)"

    def _rank(self, place: int) -> tuple[int, int]:
        phase, order = cause_rank(self._block.info(int(self._hits.rows[place])))
        return phase, -1 if self._is_first(place) else order

    def _is_first(self, place: int) -> bool:
        return self._hits.is_first is not None and bool(self._hits.is_first[place])


def steps_of(findings: Sequence[Finding]) -> NDArray[np.int64]:
    """The step of each finding, int64 of shape (n,)."""
    if isinstance(findings, FindingRows):
        return findings.steps
    return np.array([finding.step for finding in findings], np.int64)


def likelihood_of(findings: Sequence[Finding], place: int) -> Likelihood:
    """The likelihood of one of some findings."""
    return findings.likelihood(place) if isinstance(findings, FindingRows) else likelihood(findings[place])


def taken(findings: Sequence[Finding], places: NDArray[np.intp]) -> Sequence[Finding]:
    """Some findings, in that order."""
    if isinstance(findings, FindingRows):
        return findings.take(places)
    return [findings[place] for place in places.tolist()]
