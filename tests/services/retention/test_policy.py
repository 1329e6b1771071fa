from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from watchstep_services.retention import RetentionTimes, UpkeepProgress, next_step

spans = st.none() | st.integers(0, 1000)
policies = st.builds(RetentionTimes, st.none() | st.integers(1, 1000), spans, spans, spans)
_MARKS = {
    "summarize": "summarized_ns",
    "compact": "compacted_ns",
    "delete_originals": "originals_gone_ns",
    "delete_tensors": "tensors_gone_ns",
}


def lived(policy: RetentionTimes, kept: UpkeepProgress) -> list[tuple[str, int]]:
    """Each step when it is due, until nothing is."""
    done: list[tuple[str, int]] = []
    while (due := next_step(policy, kept)) is not None:
        done.append(due)
        if due[0] == "delete_run":
            return done
        kept = replace(kept, **{_MARKS[due[0]]: due[1]})  # type: ignore[arg-type]
    return done


@given(policies, st.integers(0, 1000))
def test_each_step_is_done_once_in_order_of_time(policy: RetentionTimes, ended: int) -> None:
    done = lived(policy, UpkeepProgress(ended))
    names = [name for name, _ in done]
    assert len(names) == len(set(names))
    assert [at for _, at in done] == sorted(at for _, at in done)
    steps = dict(done)
    if policy.runs is not None:
        assert done[-1] == ("delete_run", ended + policy.runs)
    else:
        assert steps.get("delete_tensors") == (None if policy.tensors is None else ended + policy.tensors)
        assert ("compact" in steps) == (policy.compact_after is not None)
        assert ("delete_originals" in steps) == (
            policy.compact_after is not None and policy.originals is not None
        )


@given(policies, st.integers(0, 1000), st.booleans())
def test_a_run_that_is_held_loses_nothing(policy: RetentionTimes, ended: int, deleting: bool) -> None:
    names = {name for name, _ in lived(policy, UpkeepProgress(ended, on_hold=True, deleting=deleting))}
    assert names <= {"summarize", "compact", "delete_originals"}


@given(policies, st.integers(0, 1000))
def test_a_deletion_that_began_is_ended(policy: RetentionTimes, ended: int) -> None:
    assert next_step(policy, UpkeepProgress(ended, deleting=True)) == ("delete_run", ended)
