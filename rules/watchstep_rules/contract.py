"""The contract of a rule: ``(params, state, context, block, now) → (state, findings)``, with no other input.

**Split invariance.** The same rows, seals and ticks, in blocks of any size, give the same findings. That makes a
backtest equal to the live run and a restart harmless. A rule keeps it by using only rows that its ``lookback`` covers,
and by carrying anything older in its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from watchstep.block import Block
from watchstep_rules.finding import Finding

Merge = Literal["per_worker", "sealed"]
Severity = Literal["info", "warning", "critical"]


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
        collections: it judges tensors of these; the default scope.
        roles: narrowed to these roles; empty for all.
        probes: extra columns that capture must add.
    """

    collections: tuple[str, ...]
    roles: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()


class Rule(ABC, Generic[P, S]):
    """A check over statistics. A subclass is one small file; instances hold nothing.

    Attributes:
        name: how users call it.
        summary: one line for lists.
        version: grows when the state's meaning changes; older state is rebuilt from lookback.
        needs: what it judges.
        merge: ``per_worker``: rows are judged as each worker's arrive, and NaN never waits for a dead rank;
            ``sealed``: a step is judged once, when all live workers passed it, with disjoint shards merged.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    version: ClassVar[int] = 1
    needs: ClassVar[Needs]
    merge: ClassVar[Merge]
    params_type: type[P]
    state_type: type[S]

    def lookback(self, params: P) -> int:  # noqa: ARG002 - overridden where it depends on them
        """How many earlier rows of each series (tensor, worker, mode) the context must hold."""
        return 0

    @abstractmethod
    def evaluate(
        self, params: P, state: S, context: Block, block: Block, now: int
    ) -> tuple[S, list[Finding]]:
        """Judge a block.

        Args:
            params: as configured.
            state: as the last call returned it; a new one at the start of an attempt.
            context: the last ``lookback`` rows of each series before the block.
            block: rows not judged before, steps ascending within each series; whole steps if ``sealed``.
            now: the stored clock tick of this evaluation, nanoseconds since the epoch.

        Returns:
            The state for the next call, and findings in the order of the rows.
        """


AnyRule = Rule[Any, Any]
