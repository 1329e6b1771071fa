"""The memory limit that concurrent readers share."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import block_of
from tests.sdk.reading.stored import FIRST, new_run, small_run, some_rows, write
from watchstep import open_run
from watchstep.reading.budget import DecodingMemory, OverBudgetError, ReadBudget
from watchstep.reading.columns import Selection

WAIT_SECONDS = 60.0
_EVERYTHING = Selection(())


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12))
def test_no_more_than_the_limit_is_decoded_at_once(sizes: list[int]) -> None:
    memory, lock = DecodingMemory(100), threading.Lock()
    taken, most = 0, 0

    def decode(size: int) -> None:
        nonlocal taken, most
        with memory.reserve(size, None, "object"):
            with lock:
                taken += size
                most = max(most, taken)
            with lock:
                taken -= size

    threads = [threading.Thread(target=decode, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert most <= 100


def test_a_reader_waits_for_memory_as_long_as_its_time_lasts() -> None:
    memory = DecodingMemory(100)
    with memory.reserve(60, None, "a"):
        with (
            pytest.raises(OverBudgetError, match="use all the memory"),
            memory.reserve(60, ReadBudget(0.01, 1), "b"),
        ):
            raise AssertionError
        with memory.reserve(40, ReadBudget(0.01, 1), "b"):
            pass


def test_what_exceeds_the_limit_by_itself_is_refused_at_once() -> None:
    memory = DecodingMemory(100 * 2**20)
    with (
        memory.reserve(60, None, "a"),
        pytest.raises(
            OverBudgetError,
            match="large one: reading it may take 101 MiB of memory, and 100 MiB are allowed",
        ),
        memory.reserve(101 * 2**20, ReadBudget(60, 1), "large one"),
    ):
        raise AssertionError


def test_what_is_released_can_be_taken_again_until_something_did_not_fit() -> None:
    """Rows were left out for what did not fit: an answer without them would be wrong."""
    budget = ReadBudget(60, 1)
    for _ in range(3):
        assert budget.take(900_000)
        budget.check()
        budget.release(900_000)
    assert budget.take(900_000)
    assert not budget.take(900_000)
    budget.release(1_800_000)
    assert not budget.take(1)
    with pytest.raises(OverBudgetError, match="more than 1 MiB"):
        budget.check()


def test_histograms_are_summed_in_the_memory_of_a_single_object(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of(some_rows(range(first, first + 40))) for first in range(0, 1200, 40)])
    run = open_run(tmp_path / "default" / "r")
    whole = run.histogram(FIRST.name, 7)
    run.index.budget = ReadBudget(60, 0.25)  # all the rows take some four times as much
    assert (run.histogram(FIRST.name, 7).counts == whole.counts).all()
    with pytest.raises(OverBudgetError, match=r"more than 0\.25 MiB"):
        run.index.blocks(None, _EVERYTHING)


def test_a_question_that_is_too_large_is_refused(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    run.index.budget = ReadBudget(60, 0.001)
    with pytest.raises(OverBudgetError, match=r"more than 0\.001 MiB"):
        run.histogram(FIRST.name, 7)
