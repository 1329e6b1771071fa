"""Listings of runs with very many segments: each takes in some, and no other run waits for the rest."""

from __future__ import annotations

import threading

import pytest

from tests.services.driving import Driven
from tests.services.recording import Recording
from watchstep.store.store import Store
from watchstep_services.runs import discovery as discovering
from watchstep_services.runs.discovery import UNLISTED, Listing, discover
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import register
from watchstep_services.scheduler import polling
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.service.context import Service
from watchstep_services.service.listings import ListingTimes

pytestmark = pytest.mark.usefixtures("small_listings")


@pytest.fixture
def small_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovering, "_SEGMENTS_AT_ONCE", 10)
    monkeypatch.setattr(discovering, "MOST_WAITING", 15)
    monkeypatch.setattr(discovering, "_LEAST_SEGMENTS", 2)


def test_a_listing_takes_in_some_segments_and_the_next_ones_the_rest(
    driven: Driven, folder_store: Store
) -> None:
    recording = Recording(folder_store).begin(world_size=2)
    for seq in range(12):
        for worker in range(2):
            recording.write(seq, seq, seq, worker=worker)
    run_id = driven.register()
    assert discover(driven.service, run_id) == Listing(fresh=True, complete=False)
    assert sorted(driven.segments(run_id)) == [(f"w{worker}", seq) for worker in range(2) for seq in range(5)]
    assert driven.run(run_id).health[UNLISTED] == 14
    # Of the room for 15, 10 are taken, and more come in only as those are read.
    discover(driven.service, run_id)
    assert len(driven.segments(run_id)) == 15
    discover(driven.service, run_id)
    assert len(driven.segments(run_id)) == 17
    for _ in range(3):
        driven.settle(run_id)
        listing = discover(driven.service, run_id)
    assert listing == Listing(fresh=False, complete=True)
    assert UNLISTED not in driven.run(run_id).health
    assert set(driven.segments(run_id).values()) == {"read"}
    assert len(driven.segments(run_id)) == 24


def test_what_a_listing_left_out_is_neither_missing_nor_the_end(driven: Driven, folder_store: Store) -> None:
    hasty = driven.with_settings(gap_seconds=1e-9)
    recording = Recording(folder_store).begin()
    for seq in range(30):
        recording.write(seq, seq, seq)
    recording.end("completed", 29)
    run_id = hasty.register()
    # A recorder whose service is slow announces its newest segment alone.
    hasty.announce(run_id, recording.key(29, 29, 29))
    unfinished = 0
    while advance_run(hasty.service, run_id) != "completed":
        unfinished += UNLISTED in hasty.run(run_id).health
        assert "missing" not in hasty.segments(run_id).values()
        hasty.evaluate(run_id)
        discover(hasty.service, run_id)
    assert unfinished
    assert set(hasty.segments(run_id).values()) == {"read"}
    assert len(hasty.segments(run_id)) == 30


def test_a_sweep_goes_on_while_a_projects_folder_takes_long_to_list(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "_LOCAL_SECONDS", 0.01)
    slow, quick = driven.register("slow"), register(driven.service, "audio", "quick", (), "recorder")
    more = [driven.register(f"more-{number}") for number in range(3)]
    found, answers, listed = discover, threading.Event(), threading.Event()

    def hanging(service: Service, run_id: int) -> Listing:
        if run_id in (slow, *more):
            assert answers.wait(60)
        listing = found(service, run_id)
        if run_id == quick:
            listed.set()
        return listing

    monkeypatch.setattr(polling, "discover", hanging)
    try:
        sweep(driven.service)
        assert listed.wait(60)
        assert driven.run(more[-1]).listed_ns == 0
    finally:
        answers.set()
        driven.service.look_threads.shutdown()


def test_a_long_listing_puts_the_next_one_off() -> None:
    times = ListingTimes(most=2)
    times.put(1, 0.1)
    times.put(2, 3.0)
    assert (times.pause_ns(1), times.pause_ns(2), times.pause_ns(3)) == (0, 60_000_000_000, 0)
    times.put(3, 1e9)
    assert times.pause_ns(3) == 600_000_000_000
    times.put(4, 0.1)
    assert times.pause_ns(2) == 0  # forgotten
