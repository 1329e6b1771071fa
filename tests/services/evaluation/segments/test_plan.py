from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from watchstep.format.layout import SegmentKey, WriterId
from watchstep_services.evaluation.inbox import GapTimeout, InboxEntry, make_plan

WRITERS = [WriterId("a1", "node", name) for name in ("w0", "w1")]
NOW = 1000


def entry(writer: int, seq: int, found_ns: int) -> InboxEntry:
    return InboxEntry(10 * writer + seq, SegmentKey(WRITERS[writer], seq, seq, seq), found_ns)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, NOW)), unique_by=lambda row: row[:2]
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_what_is_read_is_contiguous_unless_a_gap_is_over(
    found: list[tuple[int, int, int]], start: int, listed: bool
) -> None:
    cursor = {WRITERS[0]: start}
    plan = make_plan(cursor, [entry(*row) for row in found], {}, GapTimeout(NOW, 500, listed))
    for writer in WRITERS:
        following = cursor.get(writer, 0)
        for held in plan.readable:
            if held.key.writer != writer:
                continue
            if held.key.seq > following:
                assert listed
                assert held.found_ns <= NOW - 500
            following = max(following, held.key.seq + 1)
    read = {held.key for held in plan.readable}
    for gap in plan.waiting:
        assert not any(key.writer == gap.writer and key.seq >= gap.start for key in read)
    assert len(plan.readable) == len(read)


def test_a_segment_follows_its_writers_earlier_ones() -> None:
    plan = make_plan(
        {}, [entry(0, 0, 9), entry(0, 1, 3), entry(1, 0, 5)], {}, GapTimeout(NOW, 500, listed=False)
    )
    assert [(held.key.writer.writer, held.key.seq) for held in plan.readable] == [
        ("w1", 0),
        ("w0", 0),
        ("w0", 1),
    ]
