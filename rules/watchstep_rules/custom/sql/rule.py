"""SQL rules: a SELECT whose result rows for a step are the findings at that step."""

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
"""Validation context in which a query is checked in a child process: when a rule config is written, not when it is read."""


class SqlParams(Params):
    """Parameters of `Sql`."""

    query: str = Field(
        min_length=1,
        max_length=MAX_QUERY,
        description="One SELECT over statistics, tensors and losses. It returns tensor, and optionally worker, mode, step, "
        "value, threshold and message.",
    )
    window: int = Field(
        1, ge=1, le=10_000, description="Number of steps in the input: the judged step and earlier ones."
    )
    memory_mb: int = Field(256, ge=16, le=8192, description="Limit of memory for one step, in MiB.")
    seconds: float = Field(1.0, gt=0, le=60, description="Limit of seconds for one step.")

    @field_validator("query")
    @classmethod
    def _may_be_run(cls, value: str, info: ValidationInfo) -> str:
        if info.context != QUERIES_CHECKED:
            return value  # it is checked before it runs
        try:
            checked(value)
        except BusyError:
            raise
        except StartError:
            pass  # a fault of the machine, not of the query
        return value


class SqlState(State):
    """State of `Sql`: steps that could not be judged.

    Attributes:
        failed_steps: number of steps at which the query failed.
        last_failure: the error of the last failed step.
    """

    failed_steps: int = 0
    last_failure: str = ""


class Sql(Rule[SqlParams, SqlState]):
    """Fires for each tensor that a query returns.

    The query runs once for each judged step ``s``, over the rows of the steps ``s - window + 1 … s`` in its scope. A result row is a finding
    about its tensor at step ``s``, if the tensor was recorded at this step. A result row with another value in the column ``step`` is
    ignored, because that step was judged before. If several workers or modes have the tensor, the columns ``worker`` and ``mode`` select
    one; without them the first is used.

    Queries run in a child process with limits of memory and time.

    A step at which the query fails is not judged. It is counted and reported as the rule's health; other steps are judged.

    There is no other input: no function reads a clock, a file, a setting or random numbers, so the same rows give the same findings.
    """

    name = "sql"
    summary = "a custom SQL query returns rows"
    needs = Needs(collections=())
    merge = "watermark"

    def lookback(self, params: SqlParams) -> int:
        """A series has one row per step, or two if it is measured before and after a reduction."""
        return 2 * (params.window - 1)

    def needed(self, params: SqlParams) -> Needs:
        """The probes that the query uses; empty if the query cannot be checked now, which its evaluation reports."""
        try:
            probes = checked(params.query).probes
        except (ValueError, RuleError):
            probes = ()
        return Needs(collections=(), probes=probes)

    def problem(self, state: SqlState) -> str:
        """The number of steps at which the query failed, and the last error."""
        if not state.failed_steps:
            return ""
        steps = "1 step was" if state.failed_steps == 1 else f"{state.failed_steps} steps were"
        return f"{steps} not judged; last error: {state.last_failure}"

    def conclusive(self, params: SqlParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, because the values that the query uses are not known."""
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
                        Sql.name, rows, entry.row,
                        value=entry.value, threshold=entry.threshold, message=entry.message,
                    )
                    for entry in outcome
                ]  # fmt: skip
        return state, findings


def _failed(state: SqlState, error: RuleError) -> SqlState:
    message = str(error).encode(errors="replace").decode().replace("\0", "\ufffd")
    return SqlState(failed_steps=state.failed_steps + 1, last_failure=message[:_MAX_FAILURE])
