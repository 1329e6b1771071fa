"""Ranks of a node that save full tensors: each has the rows about its own objects, whoever writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sdk.capture.node.ranks import do_all, leader_of, node
from tests.sdk.capture.saved_rows import assert_one_for_each_object, assert_steps_never_go_back, marks_of
from watchstep import open_run


@pytest.mark.parametrize("leader_leaves", [False, True])
def test_each_rank_has_the_rows_about_its_objects(
    tmp_path: Path, folder: dict[str, str], *, leader_leaves: bool
) -> None:
    with node(3, {**folder, "TEST_SAVES": "1"}) as ranks:
        do_all(ranks, "record 10")
        do_all(ranks, "wait 10")
        left = dict(enumerate(ranks))
        if leader_leaves:
            left.pop(leader_of(ranks)).do("close")
        do_all(list(left.values()), "record 10")
        do_all(list(left.values()), "close")
    run = open_run(tmp_path / "store" / "default" / "r")
    assert_one_for_each_object(run)
    assert_steps_never_go_back(tmp_path / "store")
    steps = {rank: 20 if rank in left else 10 for rank in range(3)}
    for rank, count in steps.items():
        assert sorted(mark.step for mark in marks_of(run) if mark.worker == rank) == list(range(count))
    assert run.damaged == {}
