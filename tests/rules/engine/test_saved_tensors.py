"""Full tensors as the input of rules: split invariance, lookback, scope, element types, limits and damaged objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.processes import traced_memory
from tests.rules.runs import Event, Outcome, Rows, Watermark, splits
from tests.rules.saved import (
    ATTEMPT,
    LOSS,
    OUTPUT,
    WEIGHT,
    Away,
    Evaluations,
    away,
    encoded,
    evaluations_of,
    mark,
    registered,
    save,
)
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.errors import NotFoundError, StoreError
from watchstep.format.block import Block
from watchstep.format.layout import SnapshotKey
from watchstep.format.snapshot import (
    INFOS,
    MAX_COLLECTIONS,
    PARTS,
    TensorPart,
    open_snapshot,
    widened,
)
from watchstep.format.tensors import Mode, SavedName, TensorInfo
from watchstep.kernels.array_kernel import measure_array
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.engine import saved_tensors
from watchstep_rules.engine.judge import RuleHealth, RuleMemory, judge_inputs
from watchstep_rules.engine.rule_inputs import JudgingProgress, RuleInputs
from watchstep_rules.engine.saved_tensors import ReferenceRun, SavedTensors, joined_saved
from watchstep_rules.saved_block import SavedBlock

NUMBERS = iter(range(100_000))
BIAS = tensor("0.bias", "biases", order=1, shape=(2,))
MODES_SAVED: tuple[Mode, ...] = ("train", "eval", "global")
INPUT = replace(tensor("2:input", "activations", order=2, shape=(2, 2)), role="input")


@pytest.fixture(autouse=True)
def _rule() -> Iterator[None]:
    with registered():
        yield


def full(value: float) -> np.ndarray[Any, Any]:
    return np.full((2, 2), value, np.float32)


def together(*rows: Row) -> list[list[Event]]:
    """All rows in one evaluation."""
    return [[Rows(block_of(rows)), Watermark(max(row.step for row in rows))]]


def steps(outcome: Outcome) -> list[int]:
    return [finding.step for finding in outcome.findings]


@st.composite
def saved_runs(draw: st.DrawFn, store: Store) -> list[Event]:
    """A run of two workers with saved objects of several collections and modes, each known some steps later; watermarks at any points."""
    random = Random(draw(st.integers(0, 2**32)))
    queues: list[list[Rows]] = []
    for worker in (0, 1):
        rows: dict[int, list[Row]] = {
            step: [Row(step, LOSS, [1.0], worker=worker)] for step in range(30) if random.random() < 0.8
        }
        numbers: dict[tuple[int, SavedName], int] = {}
        learned = 0
        for step in sorted(random.sample(range(24), random.randint(1, 12))):
            for mode, collection, info in (
                ("train", "activations", OUTPUT),
                ("eval", "activations", OUTPUT),
                ("train", "weights", WEIGHT),
            ):
                if random.random() < 0.3:
                    continue
                value = random.choice([0.0, 1.0, 1.0, 3.0, 9.0])
                save(store, step, {info: full(value)}, mode=mode, worker=worker, collection=collection)  # type: ignore[arg-type]
                learned = max(learned, min(29, step + random.randint(0, 5)))
                name = SavedName(mode, collection)  # type: ignore[arg-type]
                number = numbers[learned, name] = numbers.get((learned, name), -1) + 1
                row = mark(step, learned, mode=mode, worker=worker, collection=collection, number=number)  # type: ignore[arg-type]
                rows.setdefault(learned, []).append(row)
        ordered = sorted(rows)
        cuts = sorted({0, len(ordered), *random.choices(range(len(ordered)), k=4)})
        queues.append(
            [
                Rows(block_of([row for step in ordered[start:end] for row in rows[step]]))
                for start, end in pairwise(cuts)
            ]
        )
    events: list[Event] = []
    watermarks = sorted(random.sample(range(29), random.randint(0, 4)), reverse=True)
    while any(queues):
        events.append(random.choice([queue for queue in queues if queue]).pop(0))
        if watermarks and random.random() < 0.5:
            events.append(Watermark(watermarks.pop()))
    return [*events, *(Watermark(step) for step in reversed(watermarks)), Watermark(30)]


def _named(value: Any) -> str:
    """The id of a parameter; a set in sorted order, so that all processes collect the same tests."""
    return str(sorted(value)) if isinstance(value, set) else str(value)


@pytest.mark.ci
@pytest.mark.parametrize("merge", ["per_worker", "watermark"])
@given(data=st.data(), before=st.integers(0, 3), hold=st.integers(1, 2))
def test_splitting_a_run_changes_no_finding(
    tmp_path: Path, merge: str, data: st.DataObject, before: int, hold: int
) -> None:
    store = Store.open(tmp_path / str(next(NUMBERS)), create=True)
    events = data.draw(saved_runs(store))
    config = away(
        merge=merge,
        before=before,
        modes=data.draw(st.sampled_from([("train",), ("train", "eval"), ()])),
        collections=("activations", "weights"),
        **{"for": MinimumDuration(steps=hold)},
    )
    evaluations = evaluations_of(store)
    outcome = evaluations.follow(config, data.draw(splits(events)))
    event(f"findings: {bool(outcome.findings)}, notified: {len(outcome.notified)}")
    for split in (data.draw(splits(events)), [[single] for single in events]):
        again = evaluations.follow(config, split)
        assert in_order(again) == in_order(outcome)
        assert again.memory.state == outcome.memory.state
        assert again.notified == outcome.notified
        assert again.memory.health is outcome.memory.health is not RuleHealth.ERROR, again.memory.problem


def in_order(outcome: Outcome) -> list[Any]:
    """Findings by step. Within an evaluation they are in the order of steps, so workers may be in another order across evaluations."""
    return sorted(
        outcome.findings, key=lambda finding: (finding.step, finding.worker, finding.mode, finding.tensor)
    )


class Looking(Away):
    """Remembers the context that it was given last."""

    seen: list[list[tuple[int, str, float]]] = []  # noqa: RUF012 - of the class, for the test

    def evaluate(self, params: Any, state: Any, context: Block, block: Block, now: int) -> Any:
        assert isinstance(context, SavedBlock)
        self.seen.append(
            [
                (int(context.step[row]), context.info(row).name, float(context.values[row].flat[0]))
                for row in range(len(context))
            ]
        )
        return super().evaluate(params, state, context, block, now)


def test_the_context_has_the_values_of_the_last_saved_objects(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from watchstep_rules.registry import RULES

    monkeypatch.setitem(RULES, "away", Looking())
    Looking.seen.clear()
    for step in (10, 20, 30, 40):
        save(folder_store, step, {OUTPUT: full(step), INPUT: full(-step)})
    # Two objects became known at one step: their rows are two series, and still two records of one tensor.
    rows = [mark(10, 25), mark(20, 25, number=1), mark(30, 31), mark(40, 41)]
    evaluations: list[list[Event]] = [[Rows(block_of([row])), Watermark(row.step)] for row in rows]
    outcome = evaluations_of(folder_store).follow(away(before=2, factor=1e9), evaluations)
    assert outcome.memory.health is RuleHealth.OK
    inputs = [(step, INPUT.name, -float(step)) for step in (20, 30)]
    outputs = [(step, OUTPUT.name, float(step)) for step in (20, 30)]
    assert sorted(Looking.seen[-1]) == sorted([*inputs, *outputs])
    assert [len(seen) for seen in Looking.seen] == [0, 2, 4, 4]


def test_a_state_of_another_version_is_rebuilt_from_earlier_objects(folder_store: Store) -> None:
    for step in (10, 20, 30):
        save(folder_store, step, {OUTPUT: full(1.0)})
    config = away(before=2, factor=1e9)
    outcome = evaluations_of(folder_store).follow(config, together(mark(10), mark(20)))
    damaged = outcome.memory.model_copy(update={"version": 0})
    history, arrived = block_of([mark(10), mark(20)]), block_of([mark(30)])
    rows = RuleInputs(history, arrived, JudgingProgress(21, 31, 7), SavedTensors(folder_store, ATTEMPT))
    verdict = judge_inputs(config, damaged, rows)
    assert verdict.memory.health is RuleHealth.OK, verdict.memory.problem
    assert verdict.memory.state == {"judged": {f"{OUTPUT.name}@0/train": [3, 12.0]}}


@pytest.mark.parametrize(
    ("tensors", "params", "judged"),
    [
        ({}, {}, {"2:input", "2:output"}),
        ({}, {"roles": ["output"]}, {"2:output"}),
        ({"include": ".*input"}, {}, {"2:input"}),
        ({"exclude": ".*input"}, {}, {"2:output"}),
        ({"collection": "weights"}, {}, {"0.weight"}),
        ({"collection": "mine"}, {}, {"mine.x"}),
        ({"collection": "losses"}, {}, set()),
        ({}, {"collections": ["weights", "biases"]}, {"0.weight", "0.bias"}),
        ({}, {"collections": ["weights"], "roles": ["bias"]}, set()),
        (
            {},
            {"collections": []},
            {"2:input", "2:output", "0.weight", "0.bias", "mine.x", "0.weight:gradient"},
        ),
    ],
    ids=_named,
)
def test_the_scope_applies_to_the_tensors_in_objects(
    folder_store: Store, tensors: dict[str, str], params: dict[str, Any], judged: set[str]
) -> None:
    mine = replace(tensor("mine.x", "mine"), collections=("activations-of-mine", "mine"), role="custom")
    gradient = replace(tensor("0.weight:gradient", "gradients"), role="gradient")
    save(folder_store, 10, {OUTPUT: full(1), INPUT: full(1)})
    save(folder_store, 10, {WEIGHT: full(1), BIAS: full(1)[0]}, collection="weights")
    save(folder_store, 10, {mine: full(1)}, collection="mine")
    save(folder_store, 10, {gradient: full(1)}, collection="gradients")
    marks = [mark(10, collection=name) for name in ("activations", "weights", "mine", "gradients")]
    outcome = evaluations_of(folder_store).follow(away(tensors=tensors, **params), together(*marks))
    assert {finding.tensor for finding in outcome.findings} == judged
    health = RuleHealth.OK if judged else RuleHealth.NO_DATA
    assert (outcome.memory.health, outcome.memory.evaluated_rows) == (health, len(judged))


@pytest.mark.parametrize(
    ("modes", "judged"),
    [
        (["train"], {"train"}),
        (["eval", "predict"], {"eval"}),
        ([], {"train", "eval", "global"}),
        (["predict"], set()),
    ],
    ids=_named,
)
def test_objects_of_other_modes_are_not_judged(
    folder_store: Store, modes: list[str], judged: set[str]
) -> None:
    for mode in MODES_SAVED:
        save(folder_store, 10, {OUTPUT: full(1)}, mode=mode)
    marks = [mark(10, mode=mode) for mode in MODES_SAVED]
    outcome = evaluations_of(folder_store).follow(away(modes=modes), together(*marks))
    assert {finding.mode for finding in outcome.findings} == judged


def test_objects_of_other_modes_take_no_place_in_the_context(folder_store: Store) -> None:
    for step in (10, 20, 30):
        save(folder_store, step, {OUTPUT: full(step)})
        save(folder_store, step, {OUTPUT: full(1)}, mode="eval")
    rows = [row for step in (10, 20, 30) for row in (mark(step), mark(step, mode="eval"))]
    outcome = evaluations_of(folder_store).follow(
        away(before=1, factor=1.2),
        [[Rows(block_of(rows[:4])), Watermark(21)], [Rows(block_of(rows[4:])), Watermark(31)]],
    )
    assert [(finding.step, finding.threshold) for finding in outcome.findings] == [(20, 48.0), (30, 96.0)]


def test_each_worker_is_judged_by_its_own_objects(folder_store: Store) -> None:
    for worker, value in ((0, 1.0), (1, 9.0), (2, 1.0)):
        save(folder_store, 10, {OUTPUT: full(0.1)}, worker=worker)
        save(folder_store, 20, {OUTPUT: full(value)}, worker=worker)
    marks = [mark(step, worker=worker) for step in (10, 20) for worker in (0, 1, 2)]
    for merge in ("per_worker", "watermark"):
        outcome = evaluations_of(folder_store).follow(
            away(before=1, factor=20, merge=merge), together(*marks)
        )
        assert [(finding.step, finding.worker) for finding in outcome.findings] == [(20, 1)]
        assert outcome.memory.evaluated_rows == 6


def test_shards_are_judged_as_the_parts_that_they_are(folder_store: Store) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    info = replace(WEIGHT, shape=(4, 3))
    for worker in (0, 1):
        part = TensorPart((4, 3), (2 * worker, 0), is_shard=True)
        shard = np.ascontiguousarray(whole[2 * worker : 2 * worker + 2])
        save(folder_store, 10, {info: shard}, worker=worker, collection="weights", parts={info.name: part})
    marks = block_of([mark(10, worker=worker, collection="weights") for worker in (0, 1)])
    block, problem = SavedTensors(folder_store, ATTEMPT).block(away(collections=["weights"]), marks)
    assert problem == ""
    assert [value.tolist() for value in block.values] == [whole[:2].tolist(), whole[2:].tolist()]
    assert block.info(0).shape == (4, 3)
    assert block.statistics.count.tolist() == [6, 6]


NARROW: dict[str, Any] = {
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}


@pytest.mark.parametrize("dtype", sorted(NARROW))
def test_narrow_floats_are_widened_exactly(folder_store: Store, dtype: str) -> None:
    count = 1 << (8 * NARROW[dtype].itemsize)
    bits = np.arange(count).astype(NARROW[dtype]).reshape(-1, 4)
    save(folder_store, 10, {replace(OUTPUT, shape=bits.shape): bits}, dtype=dtype)
    block, problem = SavedTensors(folder_store, ATTEMPT).block(away(), block_of([mark(10)]))
    assert problem == ""
    assert block.values[0].dtype == np.float32
    assert block.values[0].tobytes() == widened(bits, dtype).tobytes()
    assert block.statistics.nan[0] == np.isnan(block.values[0]).sum()


@pytest.mark.parametrize(
    "array",
    [
        np.array([[True, False]]),
        np.array([0, 255], np.uint8),
        np.array([-(2**63), 2**63 - 1], np.int64),
        np.array([2**64 - 1], np.uint64),
        np.array([65504.0, -np.inf, np.nan], np.float16),
        np.array([1e308, -0.0], np.float64),
        np.array([[1 + 2j, np.nan]], np.complex64),
        np.array(3 - 4j, np.complex64),
        np.array(7.0, np.float32),
        np.empty((0, 3), np.float32),
        np.empty((2, 0), np.bool_),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_values_of_every_type_and_shape_are_those_of_the_object(folder_store: Store, array: Any) -> None:
    save(folder_store, 10, {replace(OUTPUT, shape=array.shape): array, INPUT: full(2.0)})
    block, problem = SavedTensors(folder_store, ATTEMPT).block(away(roles=["output"]), block_of([mark(10)]))
    assert (problem, len(block)) == ("", 1)
    values = block.values[0]
    assert (values.dtype, values.shape, values.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert block.statistics.count[0] == array.size * (2 if array.dtype.kind == "c" else 1)


def test_without_a_store_the_rule_reports_it(folder_store: Store) -> None:
    rows = RuleInputs(Block.empty(), block_of([mark(10)]), JudgingProgress(-1, 11, 7))
    verdict = judge_inputs(away(), RuleMemory(), rows)
    assert verdict.memory.health is RuleHealth.ERROR
    assert "full tensors cannot be read here" in verdict.memory.problem


# Limits. Each is reported for the rules that exceed it, the alert keeps its state, and other rules are judged.


def limited(store: Store, *, reader: Any = None) -> tuple[Outcome, Outcome, Outcome]:
    """The outcome of a firing alert when the next evaluation exceeds a limit, of a smaller rule, and of one over statistics."""
    save(store, 10, {OUTPUT: full(9.0), BIAS: full(9.0)[0]})
    save(store, 20, {OUTPUT: full(0.0), BIAS: full(9.0)[0]})
    configs = [
        away(name="large", collections=["activations", "biases"]),
        away(name="small", collections=["biases"]),
        RuleConfig(rule="exploding_gradient"),
    ]
    evaluations = Evaluations(reader or (lambda: SavedTensors(store, ATTEMPT)))
    large, small, other = evaluations.follow_all(
        configs, [together(mark(10))[0], [Rows(block_of([mark(20), Row(21, LOSS, [1.0])])), Watermark(21)]]
    )
    return large, small, other


def test_within_the_limits_the_alert_is_resolved(folder_store: Store) -> None:
    large, small, other = limited(folder_store)
    assert large.memory.alert.phase.value == "firing"  # for the bias
    assert len(large.findings) == 3
    assert [outcome.memory.health for outcome in (large, small, other)] == [
        RuleHealth.OK,
        RuleHealth.OK,
        RuleHealth.NO_DATA,
    ]


@pytest.mark.parametrize(
    ("limit", "value", "problem"),
    [
        (
            "STEP_BYTES",
            16,
            "step 20: 2 tensors of activations have 48 bytes; a rule reads at most 16 of a step",
        ),
        ("EVALUATION_BYTES", 16, "the tensors of this evaluation have more than 16 bytes"),
    ],
)
def test_bytes_beyond_a_limit_are_reported(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, problem: str
) -> None:
    def reader() -> SavedTensors:
        evaluations.append(1)
        if len(evaluations) == 2:
            monkeypatch.setattr(saved_tensors, limit, value)
        return SavedTensors(folder_store, ATTEMPT)

    evaluations: list[int] = []
    large, small, other = limited(folder_store, reader=reader)
    assert (large.memory.health, problem in large.memory.problem) == (RuleHealth.ERROR, True), (
        large.memory.problem
    )
    assert large.memory.alert.phase.value == "firing"
    assert steps(large) == [10, 10]
    assert (small.memory.health, steps(small)) == (RuleHealth.OK, [10, 20])
    assert other.memory.health is RuleHealth.NO_DATA
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("array", "dtype", "size"),
    [(np.zeros(8, np.uint8), "F8_E4M3", 64), (np.zeros(8, np.complex64), None, 128)],
)
def test_bytes_count_as_the_elements_to_which_rules_convert(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, array: Any, dtype: str | None, size: int
) -> None:
    save(folder_store, 10, {replace(OUTPUT, shape=(8,)): array}, dtype=dtype)
    monkeypatch.setattr(saved_tensors, "STEP_BYTES", size - 1)
    outcome = evaluations_of(folder_store).follow(away(), together(mark(10)))
    assert f"have {size} bytes" in outcome.memory.problem


def test_the_newest_objects_are_read_and_the_others_counted(folder_store: Store) -> None:
    count = saved_tensors.EVALUATION_OBJECTS + 5
    for step in range(count):
        save(folder_store, step, {OUTPUT: full(9.0)})
    outcome = evaluations_of(folder_store).follow(
        away(), together(*(mark(step, count) for step in range(count)))
    )
    assert steps(outcome) == list(range(5, count))
    assert (
        outcome.memory.problem == "5 of 55 saved objects were not read: at most 50 are read in one evaluation"
    )
    # The next evaluation is within the limit.
    save(folder_store, count, {OUTPUT: full(0.0)})
    rows = RuleInputs(
        Block.empty(),
        block_of([mark(count)]),
        JudgingProgress(count, count + 1, 7),
        SavedTensors(folder_store, ATTEMPT),
    )
    assert judge_inputs(away(), outcome.memory, rows).memory.health is RuleHealth.OK


def test_the_tensors_of_all_objects_are_limited(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "EVALUATION_TENSORS", 3)
    for step in (10, 20):
        save(folder_store, step, {OUTPUT: full(9.0), INPUT: full(9.0)})
    outcome = evaluations_of(folder_store).follow(away(), together(mark(10), mark(20)))
    assert "have more than 3 tensors" in outcome.memory.problem


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowStore(Store):
    """A store of which each request takes some seconds of a clock."""

    def __init__(self, inner: Store, clock: Clock, seconds: float) -> None:
        super().__init__(inner.url, None)
        self.inner, self.clock, self.seconds, self.requests = inner, clock, seconds, 0

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.clock.now += self.seconds
        self.requests += 1
        return self.inner.get_range(key, start, length)


def test_the_time_for_reading_is_limited_and_that_of_rules_does_not_count(folder_store: Store) -> None:
    clock = Clock()
    slow = SlowStore(folder_store, clock, 3.0)
    save(folder_store, 10, {OUTPUT: full(9.0)})
    save(folder_store, 10, {WEIGHT: full(9.0)}, collection="weights")
    save(folder_store, 20, {OUTPUT: full(9.0)})
    saved = SavedTensors(slow, ATTEMPT, clock=clock)
    block, _ = saved.block(away(), block_of([mark(10)]))
    clock.now += 1000.0  # a rule judges
    assert len(block) == 1
    saved.block(away(collections=["weights"]), block_of([mark(10, collection="weights")]))
    with pytest.raises(Exception, match="reading full tensors took more than 10 s in one evaluation"):
        saved.block(away(), block_of([mark(20)]))
    # What was read is not read again, and not limited.
    assert len(saved.block(away(), block_of([mark(10)]))[0]) == 1


def test_rules_share_what_was_read_and_near_tensors_are_one_request(folder_store: Store) -> None:
    clock = Clock()
    counting = SlowStore(folder_store, clock, 0.0)
    save(folder_store, 10, {OUTPUT: full(1.0), INPUT: full(2.0), BIAS: full(3.0)[0]})
    saved = SavedTensors(counting, ATTEMPT)
    saved.block(away(), block_of([mark(10)]))
    first = counting.requests
    saved.block(away(name="again", tensors={"include": "2:.*"}), block_of([mark(10)]))
    assert (first, counting.requests) == (2, 2)  # the header and the tensors


def test_a_request_for_tensors_far_apart_is_bounded(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tensors, "_REQUEST_BYTES", 64)
    values = {tensor(f"{number:02}:output", "activations"): full(number) for number in range(12)}
    save(folder_store, 10, values)
    counting = SlowStore(folder_store, Clock(), 0.0)
    block, _ = SavedTensors(counting, ATTEMPT).block(away(), block_of([mark(10)]))
    assert [float(value[0, 0]) for value in block.values] == list(map(float, range(12)))
    assert counting.requests == 1 + 3


# Objects that are gone, damaged, or written by somebody else: reported, and nothing else is affected.


def with_bad(store: Store, *more: Row) -> Outcome:
    """The outcome for sound objects at steps 10 and 30 and whatever is at step 20."""
    for step in (10, 30):
        save(store, step, {OUTPUT: full(9.0)})
    outcome = evaluations_of(store).follow(away(), together(mark(10), mark(20), mark(30), *more))
    assert steps(outcome) == [10, 30]
    assert outcome.memory.alert.phase.value == "firing"
    assert outcome.memory.health is RuleHealth.ERROR
    return outcome


def test_an_object_that_a_ring_deleted_is_reported(folder_store: Store) -> None:
    problem = with_bad(folder_store).memory.problem
    assert (
        problem
        == "snapshot tensors/a1/0/20-train-activations.safetensors does not exist, or no longer exists"
    )


PATH = SnapshotKey(ATTEMPT, 0, 20, "train", "activations").path


@pytest.mark.parametrize("cut", [0, 4, 7, 8, 40, -16, -1])
def test_a_truncated_object_is_reported(folder_store: Store, cut: int) -> None:
    data = encoded({OUTPUT: full(9.0)})
    folder_store.put(PATH, data[:cut])
    assert "snapshot tensors/a1/0/20-train-activations.safetensors" in with_bad(folder_store).memory.problem


def hostile(name: str, value: str) -> bytes:
    return encoded({OUTPUT: full(9.0)}, metadata={name: value})


def described(**fields: Any) -> str:
    return json.dumps({OUTPUT.name: {"collections": ["activations"], "role": "output", **fields}})


@pytest.mark.parametrize(
    "data",
    [
        hostile(INFOS, "{"),
        hostile(INFOS, "[]"),
        hostile(INFOS, "[" * 100_000),
        hostile(INFOS, json.dumps({OUTPUT.name: 3})),
        hostile(INFOS, described(order=True)),
        hostile(INFOS, described(order=-1)),
        hostile(INFOS, described(order=2**80)),
        hostile(INFOS, described(order=1.5)),
        hostile(INFOS, described(role=3)),
        hostile(INFOS, described(collections="activations")),
        hostile(INFOS, described(collections=[["activations"]])),
        hostile(INFOS, described(collections={"activations": 1})),
        hostile(INFOS, described(module="m" * 100_000)),
        hostile(INFOS, described(collections=["activations", "c" * 5000])),
        hostile(PARTS, "{"),
        hostile(PARTS, "[" * 100_000),
        hostile(PARTS, json.dumps({OUTPUT.name: {"shape": [2, 2], "start": [1, 0], "shard": True}})),
        encoded({replace(OUTPUT, name="n" * 5000): full(9.0)}),
        encoded({OUTPUT: full(9.0)}) + b"more",
        b"\xff" * 64,
        b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64),
    ],
    ids=range(21),
)
def test_a_damaged_or_hostile_object_is_reported(folder_store: Store, data: bytes) -> None:
    folder_store.put(PATH, data)
    problem = with_bad(folder_store).memory.problem
    assert problem.startswith("snapshot tensors/a1/0/20-train-activations.safetensors"), problem
    assert len(problem) <= 500


@given(data=st.data())
def test_any_damage_of_bytes_is_reported_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(encoded({OUTPUT: full(9.0), INPUT: full(1.0)}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    store = Store.open(tmp_path / str(next(NUMBERS)), create=True)
    store.put(PATH, bytes(whole))
    save(store, 10, {OUTPUT: full(9.0)})
    block, problem = SavedTensors(store, ATTEMPT).block(away(), block_of([mark(10), mark(20)]))
    assert 10 in block.step.tolist()
    assert problem or {20} <= set(block.step.tolist()) or len(block) == 1
    assert len(block.values) == len(block)


@pytest.mark.parametrize("step", [float("nan"), float("inf"), -1.0, 2.5, 1e300])
def test_a_row_that_names_no_object_is_reported(folder_store: Store, step: float) -> None:
    row = replace(mark(20, 21), values=[step])
    save(folder_store, 10, {OUTPUT: full(9.0)})
    outcome = evaluations_of(folder_store).follow(away(), together(mark(10), row))
    assert steps(outcome) == [10]
    assert outcome.memory.problem == "row 'saved:train:activations' names no saved object"


@pytest.mark.parametrize("collection", ["../../other", "..", "a/b", "a" * 200, "x\0y"])
def test_a_collection_with_an_impossible_name_is_reported(folder_store: Store, collection: str) -> None:
    save(folder_store, 10, {OUTPUT: full(9.0)})
    outcome = evaluations_of(folder_store).follow(away(), together(mark(10), mark(20, collection=collection)))
    assert steps(outcome) == [10]
    assert "cannot be used" in outcome.memory.problem


@pytest.mark.parametrize(
    "name",
    ["saved", "saved:train", "saved:odd:activations", "kept:train:activations", "saved:train:a:b:c", ""],
)
def test_rows_of_the_role_with_another_name_are_no_objects(folder_store: Store, name: str) -> None:
    row = Row(11, TensorInfo(name, ("saved",), "saved"), [10.0], "global")
    outcome = evaluations_of(folder_store).follow(away(), together(row))
    assert outcome.memory.health is RuleHealth.NO_DATA


class Failing(Store):
    """A store that does not answer for tensors, or that loses objects between their header and their tensors."""

    def __init__(self, inner: Store, error: Exception) -> None:
        super().__init__(inner.url, None)
        self.inner, self.error, self.requests = inner, error, 0

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests += 1
        if self.requests > 1:
            raise self.error
        return self.inner.get_range(key, start, length)


def test_an_object_that_is_deleted_while_it_is_read_is_reported(folder_store: Store) -> None:
    save(folder_store, 10, {OUTPUT: full(9.0)})
    store = Failing(folder_store, NotFoundError("object x: not found", "none"))
    outcome = Evaluations(lambda: SavedTensors(store, ATTEMPT)).follow(away(), together(mark(10)))
    assert (outcome.memory.health, outcome.memory.problem) == (RuleHealth.ERROR, "object x: not found")


def test_a_store_that_does_not_answer_is_the_problem_of_the_rule(folder_store: Store) -> None:
    save(folder_store, 10, {OUTPUT: full(9.0)})
    store = Failing(folder_store, StoreError("store x: no answer", "try again"))
    outcomes = Evaluations(lambda: SavedTensors(store, ATTEMPT)).follow_all(
        [away(), RuleConfig(rule="non_finite_values")],
        [[Rows(block_of([mark(10), Row(11, LOSS, [float("nan")])])), Watermark(11)]],
    )
    assert "store x: no answer" in outcomes[0].memory.problem
    assert (outcomes[1].memory.health, steps(outcomes[1])) == (RuleHealth.OK, [11])


def test_many_problems_are_summarized(folder_store: Store) -> None:
    outcome = evaluations_of(folder_store).follow(
        away(), together(*(mark(step) for step in range(10, 80, 10)))
    )
    assert outcome.memory.problem.count("does not exist") == 3
    assert outcome.memory.problem.endswith("; and 4 more")


def test_rows_of_several_objects_are_in_the_order_of_rules() -> None:
    def rows(step: int, *infos: TensorInfo) -> SavedBlock:
        block = block_of([Row(step, info, [1.0]) for info in infos])
        return SavedBlock.of(block, [full(step)] * len(infos))

    joined = joined_saved([rows(20, WEIGHT, OUTPUT), rows(10, OUTPUT), SavedBlock.empty()])
    named = [
        (int(joined.step[row]), joined.info(row).name, float(joined.values[row][0, 0])) for row in range(3)
    ]
    assert named == [(10, "2:output", 10.0), (20, "0.weight", 20.0), (20, "2:output", 20.0)]
    assert joined.take(np.array([2, 0])).values[0][0, 0] == 20.0
    last = joined.tail(1)
    assert isinstance(last, SavedBlock)
    assert last.values[0][0, 0] == 20.0


# Objects that a hostile recorder writes to take time or memory.

REFERENCE = RuleConfig(rule="similar_across_runs", params={"run": "good", "elementwise": True})


def of_two_runs(root: Store, values: Any, other: Any = None, **more: Any) -> tuple[Store, SavedTensors]:
    """The reader of a run with a saved object at step 10, and its reference run with the same object."""
    mine, good = root.child("p/mine/"), root.child("p/good/")
    save(mine, 10, values, collection="weights")
    save(good, 10, values if other is None else other, collection="weights")
    return good, SavedTensors(mine, ATTEMPT, lambda run: ReferenceRun(run, ATTEMPT, good), **more)


WEIGHTS_AT_10 = block_of([mark(10, collection="weights")])


def test_a_tensor_in_very_many_collections_is_refused(folder_store: Store) -> None:
    names = tuple(f"c{number:02}" for number in range(MAX_COLLECTIONS + 1))
    accepted, refused = (replace(OUTPUT, collections=("activations", *names[:n])) for n in (31, 32))
    save(folder_store, 10, {accepted: full(9.0)})
    save(folder_store, 20, {refused: full(9.0)})
    outcome = evaluations_of(folder_store).follow(away(), together(mark(10), mark(20)))
    assert steps(outcome) == [10]
    assert "is in 33 collections, at most 32 are allowed" in outcome.memory.problem


def test_only_collections_that_can_have_objects_are_looked_up_in_the_reference_run(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = replace(WEIGHT, collections=("/a", "mine", "my layers", "weights"))
    bias = replace(BIAS, collections=("mine", "weights"))
    _, saved = of_two_runs(folder_store, {info: full(1.0), bias: full(1.0)[0]}, {OUTPUT: full(1.0)})
    opened = []

    def counted(store: Store, key: str) -> Any:
        opened.append((store.location.rpartition("/")[2], SnapshotKey.parse(key).collection))
        return open_snapshot(store, key)

    monkeypatch.setattr(saved_tensors, "open_snapshot", counted)
    block, problem = saved.block(REFERENCE, WEIGHTS_AT_10)
    assert (problem, block.references) == ("", (None, None))
    assert opened == [("mine", "weights"), ("good", "weights"), ("good", "mine"), ("good", "")]


class SlowToFind(SlowStore):
    """A store that takes its time to find that an object does not exist."""

    def size(self, key: str) -> int:
        self.clock.now += self.seconds
        return super().size(key)


def test_looking_up_collections_is_within_the_time_limit(folder_store: Store) -> None:
    clock = Clock()
    info = replace(WEIGHT, collections=(*(f"c{number:02}" for number in range(20)), "weights"))
    good, _ = of_two_runs(folder_store, {info: full(1.0)}, {OUTPUT: full(1.0)})
    slow = SlowToFind(good, clock, 3.0)
    saved = SavedTensors(
        folder_store.child("p/mine/"), ATTEMPT, lambda run: ReferenceRun(run, ATTEMPT, slow), clock
    )
    with pytest.raises(Exception, match="took more than 10 s"):
        saved.block(REFERENCE, WEIGHTS_AT_10)


def test_headers_are_not_kept(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1024 * 1024
    for step in range(20):
        save(folder_store, step, {OUTPUT: full(9.0)}, metadata={"x": "y" * size})
    for step in range(20, 40):
        save(folder_store, step, {OUTPUT: full(9.0)}, metadata={"x": "y" * size, INFOS: "["})
    saved = SavedTensors(folder_store, ATTEMPT)
    marks = block_of([mark(step) for step in range(40)])
    saved.block(away(), marks)
    with traced_memory() as memory:
        kept = SavedTensors(folder_store, ATTEMPT)
        block, problem = kept.block(away(), marks)
    assert (len(block), "and 17 more" in problem) == (20, True)
    assert memory.size < 5 * size


def test_the_memory_of_descriptions_is_limited(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "EVALUATION_DESCRIPTION_BYTES", 20_000)
    save(folder_store, 10, {OUTPUT: full(9.0)})
    assert evaluations_of(folder_store).follow(away(), together(mark(10))).memory.health is RuleHealth.OK
    save(folder_store, 10, {replace(OUTPUT, module="m" * 4000): full(9.0)})
    for step in range(20, 30):
        save(folder_store, step, {replace(OUTPUT, module="m" * 4000): full(9.0)})
    outcome = evaluations_of(folder_store).follow(away(), together(*(mark(step) for step in range(20, 30))))
    assert (
        "descriptions of the saved tensors of this evaluation take more than 20000" in outcome.memory.problem
    )


def test_values_are_measured_only_for_rules_that_read_statistics_and_once(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {tensor(f"{number}.bias", "weights"): np.full(1, number, np.float32) for number in range(20)}
    values[WEIGHT] = full(3.0)
    _, saved = of_two_runs(folder_store, values)
    measured = []

    def counted(array: Any) -> Any:
        measured.append(array)
        return measure_array(array)

    monkeypatch.setattr(saved_tensors, "measure_array", counted)
    rows = RuleInputs(Block.empty(), WEIGHTS_AT_10, JudgingProgress(-1, 11, 7), saved)
    assert judge_inputs(REFERENCE, RuleMemory(), rows).memory.health is RuleHealth.OK
    assert measured == []
    for _ in range(2):
        block, _ = saved.block(REFERENCE, WEIGHTS_AT_10)
        assert block.statistics.mean.tolist() == [float(array.mean()) for array in block.values]
        assert block.statistics.count.tolist() == [array.size for array in block.values]
        assert len(block.statistics.histogram) == len(block)
    assert len(measured) == 1  # single numbers are measured together


def test_measuring_is_within_the_time_limit(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    values = {tensor(f"{number}.weight", "weights"): full(number) for number in range(4)}
    _, saved = of_two_runs(folder_store, values, clock=clock)

    def slow(array: Any) -> Any:
        clock.now += 4.0
        return measure_array(array)

    monkeypatch.setattr(saved_tensors, "measure_array", slow)
    block, _ = saved.block(REFERENCE, WEIGHTS_AT_10)
    with pytest.raises(Exception, match="took more than 10 s"):
        _ = block.statistics.mean
