"""References of an attempt: how they are read and computed, within limits, and checked when somebody else wrote them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import Row, block_of, tensor
from tests.services.recording import LOSS, Recording
from watchstep.errors import FormatError, StoreError
from watchstep.format import segment
from watchstep.format.block import Block
from watchstep.format.layout import references_document
from watchstep.format.tensors import Placement
from watchstep.reading.index import RunIndex
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules import references
from watchstep_rules.builtin.sagemaker.tensors import SagemakerSimilarAcrossRunsParams
from watchstep_rules.builtin.tensors.similar_across_runs import SimilarAcrossRunsParams
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.references import (
    JudgedAttempt,
    PinnedReferences,
    compared_by,
    pin_references,
    read_references,
    with_references,
)
from watchstep_rules.signals import reference
from watchstep_rules.signals.reference import (
    MOST_POINTS,
    MOST_TENSORS,
    CheckedReference,
    ComparedRows,
    reference_of,
)

NUMBERS = iter(range(100_000))
FIGURES = ("rms", "mean", "max", "abs_max", "std", "zero_share")
TENSORS = (LOSS, tensor("a.weight", "weights", order=1), tensor("b.weight", "weights", order=2))


def comparing(*figures: str, run: str = "good") -> list[RuleConfig]:
    return [
        RuleConfig(rule="similar_across_runs", name=f"{run}-{figure}", params={"run": run, "figure": figure})
        for figure in figures
    ]


def recorded(store: Store, rows: list[list[Row]], run: str = "good") -> Recording:
    """A run with a segment for each list of rows."""
    recording = Recording(store, run).begin()
    for seq, part in enumerate(rows):
        steps = [row.step for row in part]
        key = recording.key(seq, min(steps), max(steps))
        recording.store.put(key.path, segment.encode(block_of(part)))
    return recording


def pinned(store: Store, configs: list[RuleConfig], *runs: str) -> PinnedReferences:
    mine = Recording(store, "mine").begin()
    pin_references(JudgedAttempt(mine.store, "a1"), configs, dict.fromkeys(runs or ("good",), "a1"))
    stored = read_references(mine.store, "a1")
    assert stored is not None
    return stored


@st.composite
def made_runs(draw: st.DrawFn) -> list[list[Row]]:
    """Rows of several workers, modes, replicas and shards, in several segments."""
    random = draw(st.randoms(use_true_random=False))
    shards = draw(st.sampled_from([1, 2]))
    parts: list[list[Row]] = []
    for first in range(0, draw(st.integers(1, 3)) * 4, 4):
        part = []
        for step in range(first, first + 4):
            for worker in range(4):
                for info in TENSORS:
                    for mode in ("train", "eval", "global"):
                        if random.random() < 0.5:
                            place = Placement(worker % shards, shards, worker // shards)
                            values = [
                                random.choice([0.0, 1.5, random.uniform(-9, 9), float("nan")])
                                for _ in range(2)
                            ]
                            part.append(Row(step, info, values, mode, worker, place))
        if part:
            parts.append(part)
    return parts


@pytest.mark.ci
@given(parts=made_runs())
def test_what_is_pinned_equals_the_reference_of_all_rows(tmp_path: Path, parts: list[list[Row]]) -> None:
    store = Store.open(tmp_path / str(next(NUMBERS)), create=True)
    good = recorded(store, parts)
    stored = pinned(store, comparing(*FIGURES))
    rows = open_run(good.store).rows()
    for figure in FIGURES:
        assert stored.statistics[f"good {figure}"] == reference_of(rows, figure, points=MOST_POINTS)


def test_a_run_is_read_once_for_all_statistics(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(folder_store, [[Row(step, info, [1.0]) for step in range(4) for info in TENSORS]])
    scans = []
    scan = RunIndex.scan

    def counted(self: RunIndex, selection: Any) -> Iterator[Any]:
        scans.append(selection)
        return scan(self, selection)

    monkeypatch.setattr(RunIndex, "scan", counted)
    monkeypatch.setattr(RunIndex, "blocks", None)  # whole rows are not read
    stored = pinned(folder_store, comparing(*FIGURES))
    assert len(stored.statistics) == len(FIGURES)
    assert len(scans) == 1
    assert "m2" in scans[0].columns
    assert "abs_sum" not in scans[0].columns


def test_rows_are_grouped_once_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    lowest = reference.lowest_workers

    def counted(block: Block) -> Any:
        calls.append(block)
        return lowest(block)

    monkeypatch.setattr(reference, "lowest_workers", counted)
    infos = [tensor(f"{number}.weight", "weights") for number in range(50)]
    assert len(reference_of(block_of([Row(0, info, [1.0], worker=1) for info in infos]))) == 50
    assert len(calls) == 1


def test_one_time_limit_covers_all_runs_and_includes_computing(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("first", "second"):
        recorded(folder_store, [[Row(step, LOSS, [1.0]) for step in range(4)]], run)
    monkeypatch.setattr(references, "_SECONDS", 0.5)
    points = ComparedRows.reference

    def slow(self: ComparedRows, values: Any, most: int) -> Any:
        time.sleep(1.0)
        return points(self, values, most)

    monkeypatch.setattr(ComparedRows, "reference", slow)
    configs = [*comparing("rms", "mean", run="first"), *comparing("rms", run="second")]
    stored = pinned(folder_store, configs, "first", "second")
    assert list(stored.statistics) == ["first mean"]
    assert set(stored.problems) == {"first", "second"}
    assert "takes more than 0.5 s for all reference runs of an attempt" in stored.problems["second"]
    assert (
        "takes more than 0.5 s"
        in stored.statistic(next(filter(None, map(compared_by, comparing("rms", run="second"))))).problem
    )


def test_a_run_with_too_many_rows_for_the_memory_has_a_stated_problem(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(folder_store, [[Row(step, LOSS, [1.0]) for step in range(4000)]], "large")
    recorded(folder_store, [[Row(step, LOSS, [1.0]) for step in range(4)]], "small")
    monkeypatch.setattr(references, "_MEGABYTES", 0.1)
    configs = [*comparing("rms", run="large"), *comparing("rms", run="small")]
    stored = pinned(folder_store, configs, "large", "small")
    assert list(stored.statistics) == ["small rms"]
    assert "more than 0.1 MiB for this one" in stored.problems["large"]


def test_the_points_of_all_references_are_limited(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("first", "second"):
        recorded(folder_store, [[Row(step, LOSS, [1.0]) for step in range(10)]], run)
    monkeypatch.setattr(references, "MAX_POINTS", 25)
    configs = [*comparing("abs_max", "mean", "rms", run="first"), *comparing("rms", run="second")]
    stored = pinned(folder_store, configs, "first", "second")
    assert list(stored.statistics) == ["first abs_max", "first mean"]
    assert all("have more than 25 points" in stored.problems[run] for run in ("first", "second"))


def document(statistics: Any) -> bytes:
    return json.dumps({"attempts": {"good": "a1"}, "statistics": statistics, "problems": {}}).encode()


MANY = {f"t{number}": [[0, 1.0]] for number in range(MOST_TENSORS + 1)}
LARGE = {f"t{number}": [[step, 1.0] for step in range(MOST_POINTS)] for number in range(51)}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (7, "not a list of points"),
        ([], "not a list of points"),
        ({"a": {}}, "not a list of points"),
        ({"a": []}, "has 0 points"),
        ({"a": [[step, 1] for step in range(MOST_POINTS + 1)]}, "has 1001 points"),
        ({"a": [[1, 1.5, 1.5, 1.5]]}, "not a step and a value"),
        ({"a": [[1]]}, "not a step and a value"),
        ({"a": ["12"]}, "not a step and a value"),
        ({"a": [[1, "2"]]}, "not a number"),
        ({"a": [[1.0, 2.0]]}, "not a number"),
        ({"a": [[True, 2.0]]}, "not a number"),
        ({"a": [[1, True]]}, "not a number"),
        ({"a": [[-1, 2.0]]}, "out of range"),
        ({"a": [[2**63, 2.0]]}, "out of range"),
        ({"a": [[1, 1.0], [1, 1.0]]}, "do not ascend"),
        ({"a": [[1, 1.0], [0, 1.0]]}, "do not ascend"),
        ({"a": [[1, float("inf")]]}, "not finite"),
        ({"a": [[1, float("nan")]]}, "not finite"),
        ({"a": [[1, 10**400]]}, "not finite"),
        (MANY, "501 tensors"),
        (LARGE, "51000 points"),
    ],
    ids=range(21),
)
def test_an_invalid_statistic_is_the_problem_of_the_rules_that_compare_with_it(
    data: Any, problem: str
) -> None:
    decoded = PinnedReferences.decode(
        document({"good mean": data, "good rms": {"a": [[1, 2], [3, 4.5]]}}), "x"
    )
    assert decoded.statistics["good rms"] == {"a": [(1, 2.0), (3, 4.5)]}
    assert decoded.statistics["good mean"] == {}
    assert problem in decoded.statistics["good mean"].problem
    assert decoded.statistics["good mean"].problem.startswith("object x does not contain")


def test_the_points_of_a_stored_object_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MAX_POINTS", 3)
    points = {"a": [[1, 1.0], [2, 1.0]]}
    decoded = PinnedReferences.decode(document({"good mean": points, "good rms": points}), "x")
    assert [reference.points for reference in decoded.statistics.values()] == [2, 0]
    with pytest.raises(FormatError, match="more than 1000 runs"):
        PinnedReferences.decode(document({f"good {number}": {} for number in range(1001)}), "x")


def test_rule_configs_share_a_checked_reference_and_check_it_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"loss": [[step, 1.0] for step in range(MOST_POINTS)]}
    decoded = PinnedReferences.decode(document({"good rms": points}), "x")
    monkeypatch.setattr(CheckedReference, "from_data", None)
    configs = comparing("rms") * 20
    configs.append(RuleConfig(rule="sagemaker_similar_across_runs", params={"other_trials": ["good"]}))
    for config in with_references(configs, decoded):
        params = config.parameters
        assert isinstance(params, SimilarAcrossRunsParams | SagemakerSimilarAcrossRunsParams)
        assert params.reference is decoded.statistics["good rms"]
        assert params.model_dump()["reference"] == decoded.statistics["good rms"]


def test_points_given_as_parameters_are_still_checked() -> None:
    params = {"reference": {"loss": [[3, 1.0], [1, 1.0]]}}
    with pytest.raises(ValueError, match="do not ascend"):
        RuleConfig(rule="similar_across_runs", params=params)


def test_the_reason_why_a_run_has_no_statistics_is_the_rules_problem(folder_store: Store) -> None:
    mine = Recording(folder_store, "mine").begin()
    config = comparing("rms")[0]
    pin_references(JudgedAttempt(mine.store, "a1"), [config], {})
    references_of_run = read_references(mine.store, "a1")
    (compared,) = with_references([config], references_of_run)
    block = block_of([Row(0, LOSS, [1.0])])
    rule, params = compared.implementation, compared.parameters
    with pytest.raises(Exception, match="when this attempt began: run 'good' has no attempt in this project"):
        rule.evaluate(params, rule.state_type(), replace(block), block, 0)
    assert mine.store.get(references_document("a1"))


def test_the_lowest_worker_is_that_of_the_tensor_step_and_mode() -> None:
    rows = [
        Row(0, LOSS, [1.0], worker=2),
        Row(0, LOSS, [1.0], worker=1),
        Row(0, LOSS, [1.0], "eval", 3),
        Row(1, LOSS, [1.0], worker=2),
        Row(0, TENSORS[1], [1.0], worker=5),
        Row(0, LOSS, [1.0], worker=1),
    ]
    assert reference.lowest_workers(block_of(rows)).tolist() == [False, True, True, True, True, True]
    assert reference.lowest_workers(block_of([])).tolist() == []
    assert np.all(reference.lowest_workers(block_of(rows[:1])))


@pytest.mark.parametrize(("failures", "is_pinned"), [(2, True), (3, False)])
def test_a_store_that_fails_for_a_moment_does_not_lose_the_reference(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, failures: int, is_pinned: bool
) -> None:
    monkeypatch.setattr(references, "_PAUSE_SECONDS", 0.0)
    recorded(folder_store, [[Row(step, LOSS, [1.0]) for step in range(4)]])
    scan, left = RunIndex.scan, [failures]

    def failing(self: RunIndex, selection: Any) -> Iterator[Any]:
        if left[0]:
            left[0] -= 1
            raise StoreError("503 SlowDown", "try again")
        return scan(self, selection)

    monkeypatch.setattr(RunIndex, "scan", failing)
    stored = pinned(folder_store, comparing("rms"))
    assert bool(stored.statistics) == is_pinned
    assert stored.problems == ({} if is_pinned else {"good": "503 SlowDown"})
