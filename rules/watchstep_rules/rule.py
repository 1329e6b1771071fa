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

Merge = Literal["per_worker", "watermark"]
Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""Severities, the least severe first."""


class Params(BaseModel):
    """Base class of a rule's parameters. Unknown names are rejected. API, CLI and forms use the JSON schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class State(BaseModel):
    """Base class of a rule's state between blocks: at most 128 bytes per tensor, stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


P = TypeVar("P", bound=Params)
S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class TensorNeeds:
    """The full tensors that a rule judges instead of statistics. Its blocks are `watchstep_rules.SavedBlock`.

    Attributes:
        every: number of steps between the steps at which the recorder is requested to save them.
        modes: modes in which they are saved; empty for all.
        reference: whether the rule compares them with those of another run, which `Rule.reference` names.
    """

    every: int = 100
    modes: tuple[Mode, ...] = ("train",)
    reference: bool = False


@dataclass(frozen=True)
class Needs:
    """The input that a rule needs.

    Attributes:
        collections: collections of the tensors to judge; the default scope. Empty for all.
        roles: roles of the tensors to judge. Empty for all.
        probes: probes that the recorder must add.
        about: roles that findings are about. Tensors of other roles are evidence, which the ``tensors`` of a rule config does not
            restrict. Empty for all.
        evidence: collections of tensors that are also evidence, whatever their role.
        metrics: metrics of the recorder that are also evidence, of any watched model, whatever the scope.
        evidence_rows: number of earlier rows of each evidence series in the context; None for the rule's lookback. A rule with a long
            lookback on losses that stores what it needs of all weights sets this, so that most rows need not be kept.
        histograms: whether the rule reads histograms. If no rule of a run does, histograms are not read, and access is an error.
        tensors: the full tensors that the rule judges, of ``collections`` and ``roles``; None for statistics.
    """

    collections: tuple[str, ...]
    roles: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    evidence_rows: int | None = None
    histograms: bool = False
    tensors: TensorNeeds | None = None

    @property
    def has_evidence(self) -> bool:
        """Whether some tensors may be evidence."""
        return bool(self.about or self.evidence or self.metrics)

    def is_evidence(self, info: TensorInfo) -> bool:
        """Whether a tensor is evidence, not judged itself."""
        by_role = bool(self.about) and info.role not in self.about
        return (
            by_role
            or any(name in info.collections for name in self.evidence)
            or any(is_metric(info, name) for name in self.metrics)
        )

    def earlier_rows(self, info: TensorInfo, lookback: int) -> int:
        """Number of earlier rows of a tensor's series in the context, given the rule's lookback."""
        if self.evidence_rows is None or not self.is_evidence(info):
            return lookback
        return min(self.evidence_rows, lookback)


def is_metric(info: TensorInfo, name: str) -> bool:
    """Whether a tensor is a metric of the recorder with this name, of any watched model."""
    return info.role == "metric" and (info.name == name or info.name.endswith(f".{name}"))


class Advice(NamedTuple):
    """Usual causes of a finding and remedies, the likeliest first."""

    usual_causes: tuple[str, ...]
    what_to_try: tuple[str, ...]


class Rule(ABC, Generic[P, S]):
    """A check over statistics. Subclasses are stateless; their state is passed to `evaluate`.

    Attributes:
        name: the rule's name.
        summary: a one-line description.
        version: incremented when the meaning of the state changes; an older state is rebuilt from the lookback.
        needs: the input that the rule needs.
        merge: ``per_worker``: rows are judged as they arrive from each worker, so that NaN never waits for a dead rank.
            ``watermark``: a step is judged once, when all live workers passed it, with disjoint shards merged.
        clock: whether the rule is evaluated at every stored tick even without new rows: a rule about missing rows.
        usual_causes: what most often makes the rule fire, the likeliest first; shown with a finding as general knowledge.
        what_to_try: remedies for these causes, in the same order of likelihood.
        cannot_distinguish: healthy trainings that the rule may report, and faults that it may miss, by its nature.
        reference_param: the parameter that receives the statistics of the reference run; empty if the rule compares none.
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
    reference_param: ClassVar[str] = ""
    params_type: type[P]
    state_type: type[S]
    type_arguments: ClassVar[tuple[Any, ...]] = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Take ``params_type`` and ``state_type`` from the type arguments: ``class Loud(Rule[LoudParams, State])``.

        A rule without type arguments has neither parameters nor state.
        """
        super().__init_subclass__(**arguments)
        for base in cls.__dict__.get("__orig_bases__", ()):
            generic = get_origin(base)
            if isinstance(generic, type) and issubclass(generic, Rule):
                parameters = getattr(generic, "__parameters__", ())
                arguments_by_name = dict(zip(parameters, get_args(base), strict=True))
                declared = generic.type_arguments or parameters  # a rule may have a generic base class
                cls.type_arguments = tuple(arguments_by_name.get(name, name) for name in declared)
        arguments_of = cls.type_arguments or (Params, State)
        for name, argument in zip(("params_type", "state_type"), arguments_of, strict=True):
            if name not in cls.__dict__:
                setattr(cls, name, argument.__bound__ if isinstance(argument, TypeVar) else argument)

    def lookback(self, params: P) -> int:
        """Number of earlier rows of each series (tensor, worker, mode) that the context must contain."""
        return 0

    def needed(self, params: P) -> Needs:
        """The input that the rule needs with these parameters."""
        return self.needs

    def applies(self, params: P) -> bool:
        """Whether there is something to compare rows with; a rule that does not apply has no data."""
        return True

    def merged(self, params: P) -> Merge:
        """The value of ``merge`` with these parameters."""
        return self.merge

    def reference(self, params: P) -> str:
        """Name of the run of the same project that the rule compares with; empty for none."""
        return ""

    def reference_figure(self, params: P) -> str:
        """The statistic of the reference run that the rule compares with; empty if it compares full tensors."""
        return ""

    def due_ns(self, params: P, state: S) -> int | None:
        """When the rule needs a tick without new rows, nanoseconds since the epoch; None if it waits for rows."""
        return None

    def problem(self, state: S) -> str:
        """Which rows the rule could not judge, and why; empty if it judged all. Reported as the rule's health."""
        return ""

    def conclusive(self, params: P, block: Block) -> NDArray[np.bool_]:
        """Rows that can show that the rule's condition is false; bool, shape (n,).

        A row without a finding ends a streak of findings and counts towards the resolution of an alert only if it is conclusive. Other
        rows are ignored. The result for a row depends only on that row. By default a row is conclusive if its tensor has a finite
        element.
        """
        return block.statistics.finite > 0

    def advice(self, finding: Finding) -> Advice:
        """Usual causes and remedies, the likeliest for this finding first."""
        return Advice(self.usual_causes, self.what_to_try)

    @abstractmethod
    def evaluate(
        self, params: P, state: S, context: Block, block: Block, now: int
    ) -> tuple[S, Sequence[Finding]]:
        """Judge a block.

        Args:
            params: the configured parameters.
            state: the state that the last call returned; a new one at the start of an attempt.
            context: the last ``lookback`` rows of each series before the block; for evidence, as ``needs`` specifies.
            block: rows that were not judged before, steps ascending within each series; whole steps if ``merge`` is ``watermark``.
            now: the stored clock tick of this evaluation, nanoseconds since the epoch.

        Returns:
            The state for the next call, and findings in the order of the rows; a `FindingRows` if there may be very many.
        """


AnyRule = Rule[Any, Any]


_PHASES = {"weight": 0, "bias": 0, "input": 1, "output": 1, "loss": 2, "gradient": 3}


class Finding(BaseModel):
    """A row that meets a rule's condition.

    Attributes:
        rule: the rule's name.
        step: the step of the row.
        mode: the mode of the step.
        worker: the rank of the row; the number of the replica if shards were merged.
        tensor: the tensor's name; empty for a finding about the run as a whole.
        module: path of the tensor's module; empty if it has none.
        module_type: the module's class.
        role: the tensor's role in its module: weight, gradient, output, loss, …
        value: the measured value.
        threshold: the threshold.
        message: value and threshold as text, with the unit.
        time_ns: the time of the row, nanoseconds since the epoch.
        cause_rank: orders the findings of one step by data flow: weights, forward, loss, backward.
        upstream: earlier tensors in the data flow that were bad at this step but have no finding of their own; the message names them.
        origin: for NaN and infinity, the first output in the order of execution that contains them, among the recorded outputs of this
            step, mode and worker; empty if there is none, or if only the input was bad.
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
    def _without_nul(cls, value: str) -> str:
        """Replace NUL, which databases reject, and which a custom rule may write."""
        return value.replace("\0", "\ufffd")


def cause_rank(info: TensorInfo) -> tuple[int, int]:
    """The position of a tensor in the data flow of a step; a lower rank can be the cause of a higher one.

    A step reads its weights, computes outputs in module order, then the loss, then gradients in reverse module order.
    """
    phase = _PHASES.get(info.role, len(_PHASES))
    return phase, -info.order if info.role == "gradient" else info.order


Likelihood = tuple[int, tuple[int, int], int]
"""Step, cause rank and worker; a lower value is the likelier cause."""


def likelihood(finding: Finding) -> Likelihood:
    """The sort key of a finding as a cause, the likeliest first: by step, data flow and rank."""
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
    """A finding about the run as a whole, without a row.

    Args:
        rule: the rule's name.
        step: the last recorded step.
        now: the tick of the evaluation, nanoseconds since the epoch.
        value: the measured value.
        threshold: the threshold.
        message: value and threshold as text.
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
        rows: indices in the block, ascending.
        values: the measured values.
        thresholds: the thresholds.
        is_first: findings that precede all others of their phase in the data flow; None if there are none.
    """

    rows: NDArray[np.intp]
    values: Floats
    thresholds: Floats
    is_first: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: NDArray[np.intp]) -> Hits:
        """The hits at some indices, in that order."""
        is_first = None if self.is_first is None else self.is_first[places]
        return Hits(self.rows[places], self.values[places], self.thresholds[places], is_first)


class FindingRows(Sequence[Finding]):
    """n findings in columns, each for a row of a block; equal to any sequence of the same findings."""

    def __init__(
        self,
        rule: str,
        block: Block,
        hits: Hits,
        words: Callable[[int, float, float], str],
        finish: Callable[[Finding, int], Finding] | None = None,
    ) -> None:
        """Store the columns; no finding is built yet.

        Args:
            rule: the rule's name.
            block: the judged rows.
            hits: the rows with a finding.
            words: returns the message, given row of the block, value and threshold.
            finish: adds to a built finding, given its row of the block; it must not change ``cause_rank``.
        """
        self._rule, self._block, self._hits = rule, block, hits
        self._words, self._finish = words, finish

    @property
    def steps(self) -> NDArray[np.int64]:
        """The step of each finding, shape (n,)."""
        steps: NDArray[np.int64] = self._block.step[self._hits.rows]
        return steps

    def series(self) -> tuple[list[tuple[str, int, str]], NDArray[np.int64]]:
        """Tensor, worker and mode of each series, in order of first occurrence; and the series index of each finding, shape (n,)."""
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
        """The `watchstep_rules.rule.likelihood` of one finding, without building it."""
        row = int(self._hits.rows[place])
        return int(self._block.step[row]), self._rank(place), int(self._block.worker[row])

    def take(self, places: NDArray[np.intp]) -> FindingRows:
        """The findings at some indices, in that order."""
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

    __hash__ = None  # type: ignore[assignment]  # unhashable, like a list

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
    """The likelihood of one finding."""
    return findings.likelihood(place) if isinstance(findings, FindingRows) else likelihood(findings[place])


def taken(findings: Sequence[Finding], places: NDArray[np.intp]) -> Sequence[Finding]:
    """The findings at some indices, in that order."""
    if isinstance(findings, FindingRows):
        return findings.take(places)
    return [findings[place] for place in places.tolist()]
