"""When snapshots are taken, what fits into memory, and which objects with full tensors are deleted on the store."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from watchstep import Snapshots
from watchstep.capture.health import RecorderHealth
from watchstep.capture.tensors.snapshots import (
    MAX_BY_REQUEST,
    Occasion,
    SnapshotMemory,
    SnapshotPlan,
    SnapshotRing,
    fitting,
)
from watchstep.errors import ConfigError


def taken(plan: SnapshotPlan, steps: range, bad: Collection[int] = ()) -> dict[int, Occasion]:
    found = {}
    for step in steps:
        if step in bad:
            plan.bad(step)
        occasion = plan.due(step)
        if occasion is not None:
            found[step] = occasion
    return found


def test_the_gate_takes_the_first_of_a_run_of_bad_steps_and_two_at_most() -> None:
    bad = {3, 4, 5, 6, 10, 11, 20, 30}
    assert taken(SnapshotPlan(Snapshots()), range(40), bad) == dict.fromkeys([3, 10], Occasion("gate"))


def test_the_gate_can_be_left_out() -> None:
    plan = SnapshotPlan(Snapshots(at_gate=False))
    assert plan.bad(3)
    assert taken(plan, range(3, 8), {4, 7}) == {}


def test_a_step_is_taken_once_however_many_optimizers_update_it() -> None:
    plan = SnapshotPlan(Snapshots())
    plan.request_next()
    assert plan.due(0) == Occasion("program")
    plan.request_next()
    assert plan.due(0) is None
    assert plan.due(1) == Occasion("program")
    assert plan.due(2) is None


def test_a_request_is_answered_once_at_its_step_or_the_next() -> None:
    plan = SnapshotPlan(Snapshots())
    assert plan.request("a", 5)
    assert plan.request("b", 2)
    assert plan.request("c", 2)
    found = taken(plan, range(4))
    assert found == {2: Occasion("request", ("b", "c"))}
    assert not plan.request("a", 5)
    assert not plan.request("b", 6)
    assert plan.request("late", 1)
    assert taken(plan, range(4, 10)) == {
        4: Occasion("request", ("late",)),
        5: Occasion("request", ("a",)),
    }


def test_requests_beyond_a_limit_are_refused_and_counted_once() -> None:
    health = RecorderHealth()
    plan = SnapshotPlan(Snapshots(), health)
    assert all(plan.request(f"a{number}", number) for number in range(MAX_BY_REQUEST))
    assert not any(plan.request(f"b{number % 8}", number) for number in range(24))
    assert health.counted()["counts"] == {"refused_snapshots": 8}
    assert not plan.request("a0", 0)
    assert len(taken(plan, range(100))) == MAX_BY_REQUEST


def test_the_rarer_reason_counts_and_a_request_stays_answered() -> None:
    plan = SnapshotPlan(Snapshots())
    plan.request("a", 0)
    plan.request_next()
    plan.bad(0)
    assert taken(plan, range(3)) == {0: Occasion("gate", ("a",))}


def test_a_wrong_setting_is_reported() -> None:
    with pytest.raises(ConfigError, match="Snapshots\\(memory_bytes=-1"):
        Snapshots(memory_bytes=-1)


@given(st.lists(st.integers(0, 20)), st.integers(0, 60))
def test_what_fits_is_within_the_bound_and_nothing_that_fits_is_omitted(
    sizes: list[int], available: int
) -> None:
    chosen = fitting(sizes, available)
    left = available - sum(sizes[place] for place in chosen)
    assert chosen == sorted(set(chosen))
    assert left >= 0
    assert all(sizes[place] > left for place in set(range(len(sizes))) - set(chosen))


@given(st.lists(st.tuples(st.integers(1, 120), st.booleans()), max_size=20))
def test_memory_stays_within_its_bound_and_is_used_again(acts: list[tuple[int, bool]]) -> None:
    memory, taken_count = SnapshotMemory(200), 0
    buffers: list[NDArray[np.uint8]] = []
    plain = memory.allocate

    def counted(size: int) -> NDArray[np.uint8]:
        nonlocal taken_count
        taken_count += 1
        return plain(size)

    memory.allocate = counted
    for size, give in acts:
        if give and buffers:
            memory.release(buffers.pop())
        before, fits = taken_count, size <= memory.available
        buffer = memory.take(size)
        assert (buffer is not None) == fits
        if buffer is not None:
            assert len(buffer) >= size
            buffers.append(buffer)
            assert taken_count - before in {0, 1}
        assert sum(map(len, buffers)) + memory.available == 200
    for buffer in buffers:
        memory.release(buffer)
    if buffers:
        before = taken_count
        memory.take(len(buffers[-1]))
        assert taken_count == before


def test_memory_starts_at_a_page_and_a_large_buffer_is_not_spent_on_little() -> None:
    memory = SnapshotMemory(10_000)
    large = memory.take(8_000)
    assert large is not None
    assert large.ctypes.data % 4096 == 0
    memory.release(large)
    small = memory.take(1_000)
    assert small is not None
    assert len(small) == 1_000
    again = memory.take(8_000)
    assert again is large
    assert memory.take(1_001) is None
    memory.release(again)
    assert memory.take(1_001) is large  # there is no room for a new buffer


def test_a_ring_drops_the_oldest_and_never_the_newest() -> None:
    ring = SnapshotRing(10)
    assert [ring.add(name, 4) for name in "abcd"] == [[], [], ["a"], ["b"]]
    assert ring.add("large", 100) == ["c", "d"]
    ring.protect()
    assert ring.add("e", 9) == []
    assert ring.add("f", 9) == ["e"]


def test_a_ring_without_a_bound_keeps_all() -> None:
    ring = SnapshotRing(None)
    assert [ring.add(str(n), 1000) for n in range(5)] == [[]] * 5
