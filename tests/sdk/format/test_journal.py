from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import FormatError, WatchstepError
from watchstep.format import journal, layout
from watchstep.format.journal import JournalEvaluation, JournalPart, JournalSegment, RankRows
from watchstep.format.layout import SCHEMA_VERSION, SegmentKey, WriterId
from watchstep.reading.run_documents import count_parts, read_journal
from watchstep.store.store import Store

WRITERS = (WriterId("a1", "node", "w0"), WriterId("a1", "node", "w1"), WriterId("a1", "other", "node-x"))


@st.composite
def segments(draw: st.DrawFn) -> JournalSegment:
    first, more = draw(st.integers(0, 2**40)), draw(st.integers(0, 9))
    key = SegmentKey(draw(st.sampled_from(WRITERS)), draw(st.integers(0, 2**31)), first, first + more)
    ranks = st.lists(
        st.builds(RankRows, st.integers(0, 9), st.just(first), st.just(first), st.integers(0, 99))
    )
    return JournalSegment(key, draw(st.none() | ranks.map(tuple)))


@st.composite
def parts(draw: st.DrawFn) -> JournalPart:
    ticks = sorted(draw(st.sets(st.integers(0, 2**31), min_size=1, max_size=4)))
    watermarks = sorted(draw(st.lists(st.integers(-1, 2**40), min_size=len(ticks), max_size=len(ticks))))
    return JournalPart(
        "a1",
        draw(st.integers(0, 2**31)),
        tuple(
            JournalEvaluation(
                tick,
                draw(st.integers(0, 2**62)),
                watermark,
                draw(st.booleans()),
                tuple(draw(st.lists(segments(), max_size=3))),
            )
            for tick, watermark in zip(ticks, watermarks, strict=True)
        ),
    )


def plain(first: int, count: int, number: int = 0) -> JournalPart:
    return JournalPart(
        "a1",
        number,
        tuple(JournalEvaluation(tick, tick, tick, False, ()) for tick in range(first, first + count)),
    )


@given(parts())
def test_a_part_reads_back(part: JournalPart) -> None:
    assert journal.decode(journal.encode(part), "it") == part


@given(parts(), st.data())
def test_a_damaged_part_is_refused_in_one_way(part: JournalPart, data: st.DataObject) -> None:
    whole = journal.encode(part)
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = data.draw(st.sampled_from([b"", b"[", b"null", b"-1", b'"', b"1e400", bytes([255])]))
    with suppress(FormatError):
        journal.decode(whole[:place] + changed + whole[place + 1 :], "it")


def changed(path: list[Any], value: Any) -> bytes:
    content = json.loads(journal.encode(JournalPart("a1", 0, (EVALUATION,))))
    place = content
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return json.dumps(content).encode()


EVALUATION = JournalEvaluation(
    3, 5, 7, False, (JournalSegment(SegmentKey(WRITERS[0], 0, 0, 7), (RankRows(0, 0, 7, 16),)),)
)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], SCHEMA_VERSION + 1),
        (["schema"], SCHEMA_VERSION - 1),
        (["schema"], True),
        (["attempt"], "../a1"),
        (["attempt"], 7),
        (["writers", 0, 0], ".."),
        (["evaluations"], []),
        (["evaluations", 0, 0], -1),
        (["evaluations", 0, 1], 2**63),
        (["evaluations", 0, 2], -2),
        (["evaluations", 0, 3], 1),
        (["evaluations", 0, 4, 0, 0], 1),
        (["evaluations", 0, 4, 0, 0], -1),
        (["evaluations", 0, 4, 0, 2], 8),
        (["evaluations", 0, 4, 0, 4], [[0, 0, 8, 1]]),
        (["evaluations", 0, 4, 0, 4], [[0, 5, 4, 1]]),
        (["evaluations", 0, 4, 0, 4], [[0, 0, 7]]),
        (["evaluations", 0, 4, 0, 1], 1.0),
    ],
)
def test_what_cannot_be_is_refused(path: list[Any], value: Any) -> None:
    with pytest.raises(FormatError):
        journal.decode(changed(path, value), "it")


def test_ticks_and_seals_go_forward() -> None:
    back = (EVALUATION, replace(EVALUATION, tick=3)), (EVALUATION, replace(EVALUATION, tick=4, watermark=6))
    for evaluations in back:
        with pytest.raises(FormatError, match="not in order"):
            journal.decode(journal.encode(JournalPart("a1", 0, evaluations)), "it")


def test_a_part_is_bounded_but_takes_a_whole_evaluation() -> None:
    many = plain(0, 2 * journal.MAX_EVALUATIONS).evaluations
    assert len(journal.first_part(many)) == journal.MAX_EVALUATIONS
    full = replace(EVALUATION, segments=EVALUATION.segments * (journal.MAX_SEGMENTS // 2 + 1))
    assert journal.first_part([full, full, full]) == (full,)
    half = replace(EVALUATION, segments=EVALUATION.segments * (journal.MAX_SEGMENTS // 2))
    assert journal.first_part([half, half, half]) == (half, half)
    ranks = replace(EVALUATION.segments[0], ranks=(RankRows(0, 0, 1, 1),) * journal.MAX_RANKS)
    wide = replace(EVALUATION, segments=(ranks,))
    assert journal.first_part([wide, wide]) == (wide,)
    assert journal.first_part([]) == ()


def test_a_journal_is_read_part_by_part(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    assert list(read_journal(store, "a1")) == []
    whole = [plain(0, 2, 0), plain(2, 3, 1), plain(5, 1, 3)]
    for part in whole:
        store.create(layout.journal_part("a1", part.number), journal.encode(part))
    store.put("journal/a1/note.txt", b"?")
    assert count_parts(store, "a1") == 2
    assert [evaluation.tick for evaluation in read_journal(store, "a1")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("second", [plain(1, 2, 1), plain(2, 2, 0), replace(plain(2, 2, 1), attempt="a2")])
def test_parts_that_do_not_follow_each_other_are_refused(tmp_path: Path, second: JournalPart) -> None:
    store = Store.open(tmp_path)
    store.create(layout.journal_part("a1", 0), journal.encode(plain(0, 2)))
    store.create(layout.journal_part("a1", 1), journal.encode(second))
    with pytest.raises(WatchstepError):
        list(read_journal(store, "a1"))
