"""The contract of a rule: ``(params, state, context, block, now) → (state, findings)``, with no other input; and its findings.

**Split invariance.** The same rows, seals and ticks, in blocks of any size, give the same findings. That makes a
backtest equal to the live run and a restart harmless. A rule keeps it by using only rows that its ``lookback`` covers,
and by carrying anything older in its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, field_validator

from watchstep.format.block import Block
from watchstep.format.tensors import Mode, TensorInfo

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

    def lookback(self, params: P) -> int:  # noqa: ARG002 - overridden where it depends on them
        """How many earlier rows of each series (tensor, worker, mode) the context must hold."""
        return 0

    def needed(self, params: P) -> Needs:  # noqa: ARG002 - overridden where it depends on them
        """What it must be given, with these parameters."""
        return self.needs

    def merged(self, params: P) -> Merge:  # noqa: ARG002 - overridden where it depends on them
        """How it takes workers, with these parameters."""
        return self.merge

    def due_ns(self, params: P, state: S) -> int | None:  # noqa: ARG002 - overridden by rules that watch the clock
        """When it wants a tick though no row comes, nanoseconds since the epoch; None where it waits for rows."""
        return None

    def problem(self, state: S) -> str:  # noqa: ARG002 - overridden by rules that may fail at a step and go on
        """Which rows it could not judge though it went on, and why; nothing where it judged all. Told as its health."""
        return ""

    def conclusive(self, params: P, block: Block) -> NDArray[np.bool_]:  # noqa: ARG002 - overridden where it depends on them
        """Which rows can show that the rule's condition does not hold; bool, shape (n,).

        A row without a finding counts towards the resolution of an alert, and ends a streak of findings, only where it is
        conclusive. The others count for nothing, as if they had not come. A row's own figures decide, and no other row. By default a
        row is conclusive where its tensor has a finite element.
        """
        return block.statistics.finite > 0

    def advice(self, finding: Finding) -> Advice:  # noqa: ARG002 - overridden where it depends on what was found
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
