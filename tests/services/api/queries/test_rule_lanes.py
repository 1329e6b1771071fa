"""Lanes: the states of a rule follow from its events, in order, without overlap, and within the shown steps."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from watchstep_rules.engine.judge import RuleHealth, RuleMemory
from watchstep_services.api.queries.rule_lanes import LaneRows, lanes_of
from watchstep_services.api.queries.run_events import RunEvent, visible_steps
from watchstep_services.api.schemas.run_pages import RuleLane
from watchstep_services.db.models import RuleConfigRow, RunRow

CONFIG = RuleConfigRow(
    id=1, run_id=1, origin="owner", name="loss_spike", rule="loss_spike", data={"rule": "loss_spike"}
)


def event(number: int, kind: str, step: int, attempt: str = "a1", **data: Any) -> RunEvent:
    named = {"attempt": attempt, "step": step, "name": "loss_spike", **data}
    return RunEvent(number, str(number), kind, number, named)


def lane(*events: RunEvent, first_steps: dict[str, int] | None = None) -> RuleLane:
    starts = first_steps or {"a1": 0}
    memory = RuleMemory(health=RuleHealth.OK, evaluated_rows=1)
    rows = LaneRows([CONFIG], {(1, attempt): memory for attempt in starts}, {})
    run = RunRow(id=1, attempt=list(starts)[-1], health={})
    (found,) = lanes_of(run, rows, events, visible_steps(starts))
    return found


def states(found: RuleLane) -> list[tuple[str, int, int | None]]:
    return [(part.state, part.first, part.last) for part in found.intervals]


def test_an_error_covers_the_states_meanwhile() -> None:
    found = lane(
        event(1, "alert.firing", 10),
        event(2, "rule.error", 20, problem="division by zero"),
        event(3, "alert.resolved", 25),
        event(4, "rule.ok", 30),
    )
    assert states(found) == [("ok", 0, 9), ("firing", 10, 19), ("error", 20, 29), ("resolved", 30, None)]
    assert found.intervals[2].message == "division by zero"


def test_a_revision_moves_the_beginning() -> None:
    found = lane(
        event(1, "alert.firing", 40, since_step=38),
        event(2, "alert.revised", 30, since_step=27),
        event(3, "alert.resolved", 60),
    )
    assert states(found) == [("ok", 0, 26), ("pending", 27, 29), ("firing", 30, 59), ("resolved", 60, None)]


def test_a_rule_without_data_and_a_removed_rule() -> None:
    assert states(lane(event(1, "rule.no_data", 1000))) == [("no_data", 0, None)]
    run = RunRow(id=1, attempt="a1", health={})
    (former,) = lanes_of(
        run,
        LaneRows([], {}, {}),
        [event(1, "alert.firing", 5, severity="critical")],
        visible_steps({"a1": 0}),
    )
    assert (former.name, former.origin, former.severity) == ("loss_spike", "", "critical")
    assert states(former) == [("firing", 5, None)]


KINDS = ("alert.firing", "alert.revised", "alert.resolved", "rule.error", "rule.ok", "rule.no_data")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.integers(0, 50),
            st.integers(0, 50),
            st.sampled_from(("a1", "a2", "a3")),
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
def test_intervals_are_in_order_do_not_overlap_and_stay_within_the_shown_steps(
    changes: list[tuple[str, int, int, str]], starts: list[int]
) -> None:
    events = [
        event(number, kind, step, attempt, since_step=min(since, step))
        for number, (kind, step, since, attempt) in enumerate(changes)
    ]
    first_steps = {f"a{number + 1}": first for number, first in enumerate(starts)}
    visible = visible_steps(first_steps)
    found = lane(*events, first_steps=first_steps)
    before = -1
    for part in found.intervals:
        assert part.first > before
        assert visible[part.attempt].contains(part.first)
        before = 10**9 if part.last is None else part.last
        assert part.last is None or (part.last >= part.first and visible[part.attempt].contains(part.last))
    assert found.intervals[0].first == min(steps.first for steps in visible.values())
