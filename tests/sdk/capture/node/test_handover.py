"""Ranks of a node hand over rows to a leader that writes: the leader changes, and every row is written once."""

from __future__ import annotations

import os
import random
import signal
import socket
from pathlib import Path

import pytest

from tests.sdk.capture.node.conftest import Server
from tests.sdk.capture.node.ranks import Rank, Written, do_all, leader_of, meeting_files, node, record
from tests.sdk.capture.saved_rows import assert_one_for_each_object, marks_of
from tests.sdk.store.faulty_s3 import Fault
from watchstep import open_run
from watchstep.capture.upload.uploader import spill_folders, sync
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.layout import CONTROL_DOCUMENT
from watchstep.store.store import Store


def written(tmp_path: Path) -> Written:
    return Written.of(Store.open(tmp_path / "store"))


@pytest.mark.ci
def test_one_object_contains_the_rows_of_all_ranks(
    tmp_path: Path, folder: dict[str, str], meeting_place: Path
) -> None:
    with node(4, folder) as ranks:
        record(ranks, 10)
        leader_of(ranks)
        do_all(ranks, "record 10")
        do_all(ranks, "close")
    found = written(tmp_path)
    found.assert_whole(dict.fromkeys(range(4), 20))
    (writer,) = found.writers
    assert writer.startswith("node-")
    assert max(len(set(block.worker.tolist())) for block in found.blocks) > 1
    run = open_run(tmp_path / "store" / "default" / "r")
    ends = {end.worker: end for end in run.ends()}
    assert {rank: (end.state, end.last_step, end.writer) for rank, end in ends.items()} == dict.fromkeys(
        range(4), ("completed", 19, writer)
    )
    for rank, end in ends.items():
        holding = [
            key.seq for key, block in zip(found.keys, found.blocks, strict=True) if rank in block.worker
        ]
        assert end.segments == max(holding) + 1
    assert [name for name in meeting_files(meeting_place) if not name.endswith("/lock")] == []


@pytest.mark.ci
def test_a_leader_that_leaves_is_followed_and_the_sequence_continues(
    tmp_path: Path, folder: dict[str, str]
) -> None:
    with node(3, folder) as ranks:
        left = dict(enumerate(ranks))
        steps = dict.fromkeys(left, 0)
        while left:
            for place in left:
                steps[place] += 5
            (count,) = {steps[place] for place in left}
            record(list(left.values()), 5, total=count)
            gone = list(left)[leader_of(list(left.values()))]
            left.pop(gone).do("close")
    written(tmp_path).assert_whole(steps, writers=1)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(2))
def test_leaders_are_killed_anywhere_and_the_others_lose_nothing(
    tmp_path: Path, folder: dict[str, str], seed: int
) -> None:
    dice = random.Random(seed)
    with node(4, folder) as ranks:
        left = dict(enumerate(ranks))
        steps = dict.fromkeys(left, 0)
        while len(left) > 1:
            gone = list(left)[leader_of(list(left.values()))]
            for rank in left.values():
                rank.say("record 200")
            if dice.random() < 0.5:
                left[gone].answer()
            left[gone].kill()
            killed = left.pop(gone)
            killed.wait()
            for place, rank in left.items():
                rank.answer()
                steps[place] += 200
        do_all(list(left.values()), "close")
    written(tmp_path).assert_rows_of({place: steps[place] for place in left})


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["late", "late_answer"])
def test_a_leader_is_killed_between_an_object_and_its_acknowledgement(server: Server, fault: Fault) -> None:
    """Also where its request reaches the store only after the others have gone on."""
    with node(3, server.environment) as ranks:
        record(ranks, 5)
        leader = leader_of(ranks)
        server.faulty.only = "/stats/"
        server.faulty.fault = fault
        do_all(ranks, "record 5")
        assert server.faulty.met.wait(60)
        server.faulty.fault = "none"  # for all but the leader's request, which is still pending
        ranks[leader].kill()
        ranks[leader].wait()
        left = [rank for place, rank in enumerate(ranks) if place != leader]
        do_all(left, "wait 10")
        do_all(left, "record 5")
        server.faulty.released.set()
        do_all(left, "close")
    server.written().assert_rows_of(dict.fromkeys(set(range(3)) - {leader}, 15), writers=1)


@pytest.mark.ci
def test_a_killed_follower_does_not_affect_other_ranks(tmp_path: Path, folder: dict[str, str]) -> None:
    with node(3, folder) as ranks:
        record(ranks, 5)
        leader = leader_of(ranks)
        ranks[(leader + 1) % 3].kill()
        living = {leader, (leader + 2) % 3}
        left = [ranks[place] for place in sorted(living)]
        record(left, 5, total=10)
        ranks[leader].kill()  # and the sequence goes on all the same
        last = ranks[(leader + 2) % 3]
        last.do("record 5")
        last.do("close")
    written(tmp_path).assert_rows_of({(leader + 2) % 3: 15}, writers=1)


@pytest.mark.ci
def test_a_store_that_lets_names_be_taken_twice_has_each_rank_write_for_itself(server: Server) -> None:
    server.faulty.exclusive = False
    with node(2, server.environment) as ranks:
        record(ranks, 5)
        healths = do_all(ranks, "close")
    found = server.written()
    found.assert_whole({0: 5, 1: 5})
    assert found.writers == ["w0", "w1"]
    assert all("created twice" in health for health in healths)


def test_where_the_first_meeting_place_is_open_to_others_ranks_meet_elsewhere_and_report_it(
    tmp_path: Path, folder: dict[str, str], meeting_place: Path
) -> None:
    (meeting_place / f"watchstep-{os.getuid()}").mkdir(mode=0o755)
    with node(2, folder) as ranks:
        record(ranks, 5)
        assert all("accessible to other users" in health for health in do_all(ranks, "close"))
    written(tmp_path).assert_whole({0: 5, 1: 5}, writers=1)


def test_a_deep_temporary_folder(tmp_path: Path, folder: dict[str, str], meeting_place: Path) -> None:
    deep = meeting_place / ("d" * 120)
    deep.mkdir()
    with node(2, {**folder, "TMPDIR": str(deep)}) as ranks:
        record(ranks, 5)
        leader_of(ranks)
        do_all(ranks, "close")
    written(tmp_path).assert_whole({0: 5, 1: 5}, writers=1)


@pytest.mark.ci
def test_while_the_store_refuses_ranks_part_and_what_they_leave_is_uploaded_once(
    server: Server, spill_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object in flight is made late; ``sync`` finds it, and uploads what is not in it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with node(3, server.environment, backlog_seconds=3.0, close_seconds=1.0) as ranks:
        record(ranks, 5)
        leader_of(ranks)
        server.faulty.only, server.faulty.fault = "/stats/", "late"
        do_all(ranks, "record 5")
        assert server.faulty.met.wait(60)
        server.faulty.fault = "denied"
        do_all(ranks, "close")
    server.faulty.fault = "none"
    folders = spill_folders(spill_root)
    assert len(folders) == 3
    assert sync(folders[0]).why == ""
    server.faulty.released.set()
    for left in folders[1:]:
        assert sync(left).why == ""
    server.written().assert_whole(dict.fromkeys(range(3), 10))


@pytest.mark.ci
def test_ranks_that_parted_continue_by_themselves(server: Server) -> None:
    with node(3, server.environment, backlog_seconds=0.3) as ranks:
        record(ranks, 5)
        server.faulty.only, server.faulty.fault = "/stats/", "denied"
        do_all(ranks, "record 5")
        for rank in ranks:
            _until_apart(rank)
        server.faulty.fault = "none"
        do_all(ranks, "wait 10")
        do_all(ranks, "record 5")
        do_all(ranks, "close")
    server.written().assert_whole(dict.fromkeys(range(3), 15))


def _until_apart(rank: Rank) -> None:
    while rank.do("role") != "Uploader":
        pass


@pytest.mark.ci
def test_a_stranger_on_the_line_is_ignored(
    tmp_path: Path, folder: dict[str, str], meeting_place: Path
) -> None:
    with node(2, folder) as ranks:
        record(ranks, 5)
        (address,) = meeting_place.glob("watchstep-*/*/socket")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(address))
            stranger.sendall(b"\xff" * 100)
            do_all(ranks, "record 5")
            do_all(ranks, "close")
    written(tmp_path).assert_whole({0: 10, 1: 10})


@pytest.mark.ci
def test_a_bad_step_of_a_follower_is_written_at_once_and_a_stop_reaches_all(
    tmp_path: Path, folder: dict[str, str]
) -> None:
    with node(3, folder, flush_seconds=1000.0, backlog_seconds=1000.0, control_seconds=0.01) as ranks:
        leader = leader_of(ranks)
        do_all(ranks, "record 2")
        stop = StopRequest("a1", 3, "it is over")
        store = Store.open(tmp_path / "store").child("default/r")
        store.put(CONTROL_DOCUMENT, ControlDocument().with_stop(stop).encode())
        follower = ranks[(leader + 1) % 3]
        follower.do("bad")
        follower.do("record 0")
        follower.say("record 1")  # hands the bad step over; and is stopped, now or at the next step
        follower.say("train")
        assert follower.wait() == 86
        for rank in ranks:
            if rank is not follower:
                rank.say("train")
                assert rank.wait() == 86
    states = {end.worker: end.state for end in open_run(tmp_path / "store" / "default" / "r").ends()}
    assert states == dict.fromkeys(range(3), "stopped")


def test_a_forked_child_has_neither_lock_nor_connection(tmp_path: Path, folder: dict[str, str]) -> None:
    with node(2, folder) as ranks:
        record(ranks, 5)
        leader = leader_of(ranks)
        do_all(ranks, "fork")
        ranks[leader].kill()
        other = ranks[1 - leader]
        other.do("record 5")
        other.do("wait 10")
        assert other.do("role") == "Leader"
        other.do("close")
    written(tmp_path).assert_rows_of({1 - leader: 10}, writers=1)


@pytest.mark.ci
def test_sigterm_has_followers_and_leader_write_what_is_left(tmp_path: Path, folder: dict[str, str]) -> None:
    with node(3, folder, flush_seconds=1000.0) as ranks:
        leader_of(ranks)
        do_all(ranks, "record 5")
        for rank in ranks:
            rank.kill(signal.SIGTERM)
        for rank in ranks:
            assert rank.wait() == -signal.SIGTERM
    written(tmp_path).assert_whole(dict.fromkeys(range(3), 5))


@pytest.mark.ci
def test_a_restart_in_the_same_attempt_has_a_writer_of_its_own(
    tmp_path: Path, folder: dict[str, str]
) -> None:
    for again in range(2):
        with node(2, folder) as ranks:
            do_all(ranks, f"record {5 + again}")
            do_all(ranks, f"wait {5 + again}")
            if again:
                do_all(ranks, "close")  # the first ones are all killed, and leave their socket
    found = written(tmp_path)
    assert len(found.writers) == 2
    found.assert_contiguous()


@pytest.mark.ci
def test_more_than_the_leader_takes_at_once(tmp_path: Path, folder: dict[str, str]) -> None:
    with node(3, folder, backlog_bytes=40_000, flush_seconds=0.3, backlog_seconds=1000.0) as ranks:
        record(ranks, 5)
        leader_of(ranks)
        for _ in range(5):
            do_all(ranks, "record 100")
        do_all(ranks, "close")
    written(tmp_path).assert_whole(dict.fromkeys(range(3), 505))


@pytest.mark.ci
@pytest.mark.parametrize("leader_leaves", [False, True])
def test_each_rank_has_the_rows_about_its_objects(
    tmp_path: Path, folder: dict[str, str], *, leader_leaves: bool
) -> None:
    with node(3, {**folder, "TEST_SAVES": "1"}) as ranks:
        record(ranks, 10)
        left = dict(enumerate(ranks))
        if leader_leaves:
            left.pop(leader_of(ranks)).do("close")
        do_all(list(left.values()), "record 10")
        do_all(list(left.values()), "close")
    run = open_run(tmp_path / "store" / "default" / "r")
    assert_one_for_each_object(run, tmp_path / "store")
    steps = {rank: 20 if rank in left else 10 for rank in range(3)}
    for rank, count in steps.items():
        assert sorted(mark.step for mark in marks_of(run) if mark.worker == rank) == list(range(count))
    assert run.damaged == {}
