"""A rule that is a SELECT: what it gives for a step are the findings at that step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator

from watchstep.errors import RuleError
from watchstep.format.block import Block, concatenate
from watchstep_rules.custom.sandbox.pool import BusyError
from watchstep_rules.custom.sandbox.process import StartError
from watchstep_rules.custom.sql.guard import MAX_QUERY
from watchstep_rules.custom.sql.process import checked, judged
from watchstep_rules.custom.sql.query import QueryLimits, Window
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_elements

_MAX_FAILURE = 400

QUERIES_CHECKED = {"queries": "checked"}
"""Validation context under which a query is checked in a process: where a rule config is written, not where it is read."""


class SqlParams(Params):
    """Parameters of `Sql`."""

    query: str = Field(
        min_length=1,
        max_length=MAX_QUERY,
        description="One SELECT over statistics, tensors and losses. It gives tensor, and may give worker, mode, step, "
        "value, threshold and message.",
    )
    window: int = Field(
        1, ge=1, le=10_000, description="How many steps it sees: the judged one and those before it."
    )
    memory_mb: int = Field(256, ge=16, le=8192, description="Memory that it may take for one step, in MiB.")
    seconds: float = Field(1.0, gt=0, le=60, description="Seconds that it may take for one step.")

    @field_validator("query")
    @classmethod
    def _may_be_run(cls, value: str, info: ValidationInfo) -> str:
        if info.context != QUERIES_CHECKED:
            return value  # it is checked before it is run
        try:
            checked(value)
        except BusyError:
            raise
        except StartError:
            pass  # the machine is at fault, not the query
        return value


class SqlState(State):
    """What could not be judged; the window holds what a query looks back on.

    Attributes:
        failed_steps: at how many steps the query failed.
        last_failure: what was said of the last of them.
    """

    failed_steps: int = 0
    last_failure: str = ""


class Sql(Rule[SqlParams, SqlState]):
    """Fires for each tensor that a query gives.

    The query is run once for each judged step ``s``, over the rows of the steps ``s - window + 1 … s`` in its scope. A row
    that it gives is a finding about that tensor at step ``s``, if it was recorded there; a row whose own column ``step`` is
    another step is left out, for it was judged when its time came. Where several workers or modes have the tensor, the
    columns ``worker`` and ``mode`` say which is meant; without them it is the first.

    Queries are run in a child process, which cannot take more memory or time than it may.

    A step at which the query fails is not judged; it is counted, told as the rule's health, and the others are judged.

    Nothing else goes in: no function reads a clock, a file, a setting or chance, so the same rows give the same findings.
    """

    name = "sql"
    summary = "a query of yours gives rows"
    needs = Needs(collections=())
    merge = "sealed"

    def lookback(self, params: SqlParams) -> int:
        """A series has a row a step, and one more where it is measured before and after a reduction."""
        return 2 * (params.window - 1)

    def needed(self, params: SqlParams) -> Needs:
        """The probes that the query names; none where it cannot be checked now, which is told when it is evaluated."""
        try:
            probes = checked(params.query).probes
        except (ValueError, RuleError):
            probes = ()
        return Needs(collections=(), probes=probes)

    def problem(self, state: SqlState) -> str:
        """At how many steps the query failed."""
        if not state.failed_steps:
            return ""
        steps = "1 step was" if state.failed_steps == 1 else f"{state.failed_steps} steps were"
        return f"{steps} not judged, the last for this: {state.last_failure}"

    def conclusive(self, params: SqlParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements: which values the query looks at is not known."""
        return has_elements(block)

    def evaluate(
        self, params: SqlParams, state: SqlState, context: Block, block: Block, now: int
    ) -> tuple[SqlState, list[Finding]]:
        """Run the query for each step."""
        if not len(block):
            return state, []
        rows = concatenate([context, block])
        rows = rows.take(np.argsort(rows.step, kind="stable"))
        judged_steps = np.unique(block.step)
        steps = judged_steps.tolist()
        begins, ends = (np.searchsorted(rows.step, judged_steps, side).tolist() for side in ("left", "right"))
        firsts = np.searchsorted(rows.step, judged_steps - params.window + 1, side="left").tolist()
        windows = [Window(*window) for window in zip(steps, firsts, begins, ends, strict=True)]
        findings: list[Finding] = []
        for outcome in judged(params.query, rows, windows, QueryLimits(params.memory_mb, params.seconds)):
            if isinstance(outcome, RuleError):
                state = _failed(state, outcome)
            else:
                findings += [
                    finding_at(
                        Sql.name, rows, found.row,
                        value=found.value, threshold=found.threshold, message=found.message,
                    )
                    for found in outcome
                ]  # fmt: skip
        return state, findings


def _failed(state: SqlState, error: RuleError) -> SqlState:
    said = str(error).encode(errors="replace").decode().replace("\0", "\ufffd")
    return SqlState(failed_steps=state.failed_steps + 1, last_failure=said[:_MAX_FAILURE])
