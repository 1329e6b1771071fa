"""A rule that is a SELECT: what it gives for a step are the findings at that step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from watchstep.block import Block, concatenate
from watchstep.errors import RuleError
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.sql_guard import MAX_QUERY, guarded
from watchstep_rules.sql_query import Limits, bounded, checked

_MAX_MESSAGE = 500
_MAX_FAILURE = 400


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
    def _may_be_run(cls, value: str) -> str:
        checked(value)
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

    A step at which the query fails is not judged; it is counted, told as the rule's health, and the others are judged.

    Nothing else goes in: no function reads a clock, a file, a setting or chance, so the same rows give the same findings.
    """

    name = "sql"
    summary = "a query of yours gives rows"
    needs = Needs(collections=())
    merge = "sealed"
    params_type = SqlParams
    state_type = SqlState

    def lookback(self, params: SqlParams) -> int:
        """A series has a row a step, and one more where it is measured before and after a reduction."""
        return 2 * (params.window - 1)

    def needed(self, params: SqlParams) -> Needs:
        """The probes that the query names."""
        return Needs(collections=(), probes=guarded(params.query).probes)

    def problem(self, state: SqlState) -> str:
        """At how many steps the query failed."""
        if not state.failed_steps:
            return ""
        steps = "1 step was" if state.failed_steps == 1 else f"{state.failed_steps} steps were"
        return f"{steps} not judged, the last for this: {state.last_failure}"

    def evaluate(
        self,
        params: SqlParams,
        state: SqlState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SqlState, list[Finding]]:
        """Run the query for each step."""
        if not len(block):
            return state, []
        rows = concatenate([context, block])
        rows = rows.take(np.argsort(rows.step, kind="stable"))
        judged = np.unique(block.step)
        findings: list[Finding] = []
        with bounded(params.query, rows, Limits(params.memory_mb, params.seconds)) as query:
            for step in judged.tolist():
                first = int(np.searchsorted(rows.step, step - params.window + 1, side="left"))
                begin, end = np.searchsorted(rows.step, (step, step + 1)).tolist()
                try:
                    given = query.run(first, end, step)
                except RuleError as error:
                    state = _failed(state, error)
                    continue
                findings.extend(_findings(rows, np.arange(begin, end), step, given))
        return state, findings


def _failed(state: SqlState, error: RuleError) -> SqlState:
    said = str(error).encode(errors="replace").decode().replace("\0", "\ufffd")
    return SqlState(failed_steps=state.failed_steps + 1, last_failure=said[:_MAX_FAILURE])


def _findings(
    rows: Block, at_step: NDArray[np.intp], step: int, given: list[dict[str, Any]]
) -> list[Finding]:
    """One finding for each row of the step that the query names, in the order of the rows."""
    if not given:
        return []
    places: dict[str, list[int]] = {}
    for row in at_step.tolist():
        places.setdefault(rows.info(row).name, []).append(row)
    meant: dict[int, dict[str, Any]] = {}
    for entry in given:
        if entry.get("step", step) != step:
            continue
        for row in places.get(entry["tensor"], []):
            if entry.get("worker") not in {None, int(rows.worker[row])}:
                continue
            if entry.get("mode") not in {None, rows.mode_name(row)}:
                continue
            meant.setdefault(row, entry)
            break
    return [_finding(rows, row, meant[row]) for row in sorted(meant)]


def _finding(rows: Block, row: int, entry: dict[str, Any]) -> Finding:
    value, threshold = _number(entry.get("value", 0.0)), _number(entry.get("threshold", 0.0))
    name = rows.info(row).name
    message = str(entry.get("message") or "")[:_MAX_MESSAGE]
    if not message:
        figures = [f"{word} {_number(entry[word]):.3g}" for word in ("value", "threshold") if word in entry]
        message = f"the query gives {name}" + (f": {', '.join(figures)}" if figures else "")
    return finding_at(Sql.name, rows, row, value=value, threshold=threshold, message=message)


def _number(value: Any) -> float:
    """A figure that does not exist (NULL, NaN) is told as infinity, which JSON and a comparison can hold."""
    number = math.nan if value is None else float(value)
    return math.inf if math.isnan(number) else number
