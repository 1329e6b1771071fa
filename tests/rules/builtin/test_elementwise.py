"""Comparison of full tensors: with another run element by element, and with earlier records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from pydantic import ValidationError

from tests.rules.runs import Event, Outcome, Rows, Watermark
from tests.rules.saved import OUTPUT, WEIGHT, Values, evaluations_of, mark, save
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.snapshot import TensorPart
from watchstep.format.tensors import TensorInfo
from watchstep.store.store import Store
from watchstep_rules.builtin.tensors import similar_across_runs
from watchstep_rules.builtin.tensors.similar_across_runs import SimilarAcrossRunsState, compare_elements
from watchstep_rules.config.attached import capture_needs
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.engine.saved_tensors import ReferenceRun
from watchstep_rules.rule import FindingRows
from watchstep_rules.saved_block import SavedBlock

NUMBERS = iter(range(100_000))
LOSS = tensor("loss", "losses", shape=())
SIMILAR = RuleConfig(rule="similar_across_runs", params={"run": "good", "elementwise": True})


def compared(
    root: Store,
    new: Sequence[Values],
    old: Sequence[Values],
    config: RuleConfig = SIMILAR,
    *,
    collection: str = "weights",
    **parts: Any,
) -> Outcome:
    """Compare the objects of a run with those of another at the same steps: 10, 20, and so on."""
    mine, other = root.child("p/mine/"), root.child("p/good/")
    for number, values in enumerate(new):
        save(mine, 10 + 10 * number, values, collection=collection, parts=parts.get("new_parts"))
    for number, values in enumerate(old):
        save(
            other, 10 + 10 * number, values, collection=collection, attempt="b1", parts=parts.get("old_parts")
        )
    evaluations = evaluations_of(mine, open_reference=lambda run: ReferenceRun(run, "b1", other))
    events: list[list[Event]] = [
        [Rows(block_of([mark(10 + 10 * number, collection=collection)])), Watermark(11 + 10 * number)]
        for number in range(len(new))
    ]
    return evaluations.follow(config, events)


def f32(values: Any) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)


def one(array: Any, info: TensorInfo = WEIGHT) -> list[Values]:
    return [{info: np.asarray(array)}]


floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-8, 1.00001])


@given(
    new=arrays.arrays(np.float32, (3, 2), elements=floats),
    old=arrays.arrays(np.float32, (3, 2), elements=floats),
    keep=arrays.arrays(np.bool_, (3, 2)),
    rtol=st.sampled_from([0.0, 1e-5, 0.1]),
    atol=st.sampled_from([0.0, 1e-8, 1.0]),
)
def test_it_fires_exactly_where_allclose_is_false(
    tmp_path: Path,
    new: NDArray[np.float32],
    old: NDArray[np.float32],
    keep: NDArray[np.bool_],
    rtol: float,
    atol: float,
) -> None:
    old = np.where(keep, new, old)
    config = RuleConfig(
        rule="similar_across_runs", params={"run": "good", "elementwise": True, "rtol": rtol, "atol": atol}
    )
    root = Store.open(tmp_path / str(next(NUMBERS)), create=True)
    outcome = compared(root, one(new), one(old), config)
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.isclose(new.astype(np.float64), old.astype(np.float64), rtol, atol, equal_nan=True)
    assert [finding.value for finding in outcome.findings] == [float((~close).sum())] * (not close.all())
    assert outcome.memory.health is RuleHealth.OK, outcome.memory.problem


@pytest.mark.parametrize(
    "array",
    [
        np.array([True, False]),
        np.array([0, 255], np.uint8),
        np.array([-(2**63), 2**63 - 1], np.int64),
        np.array([65504, np.nan], np.float16),
        np.array([1 + 2j, np.nan], np.complex64),
        np.array(3.0, np.float32),
        np.empty((0, 2), np.float32),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_equal_run_never_fires_whatever_its_types(folder_store: Store, array: Any) -> None:
    outcome = compared(folder_store, one(array), one(array))
    assert (outcome.findings, outcome.memory.health) == ([], RuleHealth.OK)
    if array.size:
        other = ~array if array.dtype == np.bool_ else array + array.dtype.type(1)
        assert compared(folder_store, one(array), one(np.nan_to_num(other, nan=1.0))).findings


def test_the_finding_says_how_many_elements_differ_and_by_how_much(folder_store: Store) -> None:
    outcome = compared(folder_store, one(f32([[1, 2], [3, 4.5]])), one(f32([[1, 2], [3, 4]])))
    (finding,) = outcome.findings
    assert (finding.step, finding.tensor, finding.value, finding.threshold) == (10, "0.weight", 1.0, 0.0)
    assert finding.message == (
        "1 of 4 elements of 0.weight are not those of run good, within 1e-05 of each and 1e-08; the largest difference is 0.5"
    )


def test_another_shape_differs(folder_store: Store) -> None:
    outcome = compared(folder_store, one(np.zeros((2, 2), np.float32)), one(np.zeros(4, np.float32)))
    assert outcome.findings[0].message == "0.weight has the shape [2, 2], in run good [4]"


def test_a_difference_of_the_same_statistics_is_found(folder_store: Store) -> None:
    """Where statistics cannot decide: the same elements in another order."""
    outcome = compared(folder_store, one(f32([1, 2, 3])), one(f32([3, 2, 1])))
    assert outcome.findings[0].value == 2.0


def test_a_tensor_without_a_counterpart_is_not_judged_and_said_only_if_nothing_was_compared(
    folder_store: Store,
) -> None:
    ones = np.ones(2, np.float32)
    missing = compared(folder_store, [{WEIGHT: ones}], [])
    assert (missing.findings, missing.memory.health) == ([], RuleHealth.ERROR)
    assert "the other run did not save 0.weight at step 10" in missing.memory.problem
    later = compared(
        folder_store.child("b/"), [{WEIGHT: ones}, {WEIGHT: ones}, {WEIGHT: ones}], [{WEIGHT: ones}]
    )
    assert later.memory.health is RuleHealth.OK
    # Rows without a counterpart do not resolve an alert.
    firing = compared(folder_store.child("c/"), [{WEIGHT: ones}, {WEIGHT: ones}], [{WEIGHT: ones + 1}])
    assert firing.memory.alert.phase.value == "firing"


def test_shards_are_compared_only_with_the_same_part(folder_store: Store) -> None:
    ones = np.ones((2, 2), np.float32)
    upper, lower = (TensorPart((4, 2), (start, 0), is_shard=True) for start in (0, 2))
    other = compared(
        folder_store, one(ones), one(ones + 1), new_parts={"0.weight": upper}, old_parts={"0.weight": lower}
    )
    assert (other.findings, other.memory.health) == ([], RuleHealth.ERROR)
    same = compared(
        folder_store.child("b/"),
        one(ones),
        one(ones + 1),
        new_parts={"0.weight": upper},
        old_parts={"0.weight": upper},
    )
    assert len(same.findings) == 1


def test_by_default_weights_and_biases_are_compared_and_saved() -> None:
    (need,) = capture_needs([SIMILAR])
    assert (need.collections, need.every, need.modes) == (("weights", "biases"), 100, ("train",))
    chosen = SIMILAR.model_copy(
        update={"tensors": SIMILAR.tensors.model_copy(update={"collection": "activations"})}
    )
    assert capture_needs([chosen])[0].collections == ("activations",)
    statistics = RuleConfig(rule="similar_across_runs", params={"run": "good"})
    assert capture_needs([statistics]) == ()


def amazons(rule: str, **params: Any) -> RuleConfig:
    return RuleConfig(rule=f"sagemaker_{rule}", params=params)


def test_sagemakers_rule_compares_named_collections(folder_store: Store) -> None:
    config = amazons(
        "similar_across_runs", other_trials=["good"], elementwise="True", collection_names="weights, relu"
    )
    (need,) = capture_needs([config])
    assert (need.collections, need.every) == (("weights", "relu"), 500)
    ones = np.ones(2, np.float32)
    outcome = compared(folder_store, one(ones), one(ones * (1 + 2e-5)), config)
    (finding,) = outcome.findings
    assert (finding.rule, finding.value) == ("sagemaker_similar_across_runs", 2.0)
    regex = amazons("similar_across_runs", other_trials="good", elementwise=True, tensor_regex="1\\.")
    assert compared(folder_store.child("b/"), one(ones), one(ones + 1), regex).findings == []
    with pytest.raises(ValidationError, match="other_trials"):
        amazons("similar_across_runs", other_trials={"loss": [(0, 1.0)]}, elementwise=True)


@pytest.mark.parametrize(
    ("trials", "run"),
    [("good", "good"), (["good"], "good"), ("", ""), ({"loss": [(0, 1.0)]}, "")],
    ids=str,
)
def test_sagemakers_other_trials_take_a_run_a_list_of_one_or_statistics(trials: Any, run: str) -> None:
    config = amazons("similar_across_runs", other_trials=trials)
    assert config.implementation.reference(config.parameters) == run
    assert config.implementation.reference_figure(config.parameters) == "rms"


@pytest.mark.parametrize("trials", [["a", "b"], [], "s3://bucket/run", ["../a"], "a..b/c", 3, [3]], ids=str)
def test_other_forms_of_other_trials_are_rejected(trials: Any) -> None:
    with pytest.raises(ValidationError, match="other_trials"):
        amazons("similar_across_runs", other_trials=trials)


def alone(
    root: Store, config: RuleConfig, values: Sequence[Any], info: TensorInfo, collection: str
) -> list[int]:
    return [
        finding.step
        for finding in compared(
            root,
            [{info: np.asarray(value, np.float32)} for value in values],
            [],
            config,
            collection=collection,
        ).findings
    ]


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 1.0, 1.00001, 1.1, math.nan]), min_size=1, max_size=9),
    num_steps=st.integers(2, 4),
    equal_nan=st.booleans(),
)
def test_sagemakers_unchanged_tensor_is_allclose_of_all_elements(
    tmp_path: Path, values: list[float], num_steps: int, equal_nan: bool
) -> None:
    config = amazons(
        "unchanged_tensor",
        full_tensors=True,
        num_steps=num_steps,
        equal_nan=equal_nan,
        collection_names="weights",
    )
    tensors = [f32([1.0, value]) for value in values]
    expected = [
        10 + 10 * index
        for index in range(num_steps - 1, len(values))
        if all(
            np.allclose(tensors[later], tensors[later - 1], 1e-5, 1e-8, equal_nan)
            for later in range(index - num_steps + 2, index + 1)
        )
    ]
    root = Store.open(tmp_path / str(next(NUMBERS)), create=True)
    assert alone(root, config, tensors, WEIGHT, "weights") == expected


def test_the_one_element_that_changes_of_many_is_seen(folder_store: Store) -> None:
    """The recorder compares 16,384 of these elements; the saved tensors are compared whole."""
    config = amazons("unchanged_tensor", full_tensors=True, num_steps=2, collection_names="weights")
    first = np.zeros(100_001, np.float32)
    second = first.copy()
    second[12_345] = 1.0
    assert alone(folder_store, config, [first, second, second], WEIGHT, "weights") == [30]


def test_sagemakers_unchanged_tensor_saves_losses_by_default(folder_store: Store) -> None:
    config = amazons("unchanged_tensor", full_tensors=True, save_interval=5)
    (need,) = capture_needs([config])
    assert (need.collections, need.every, need.modes, need.probes) == (("losses",), 5, (), ())
    assert alone(folder_store, config, [3.0] * 4, LOSS, "losses") == [30, 40]


@given(
    changes=st.lists(st.sampled_from([0.0, 1e-9, 1e-3, 20.0]), min_size=1, max_size=6),
    num_steps=st.none() | st.integers(1, 40),
)
def test_sagemakers_weight_update_ratio_is_of_all_elements(
    tmp_path: Path, changes: list[float], num_steps: int | None
) -> None:
    config = amazons("weight_update_ratio", full_tensors=True, num_steps=num_steps, save_interval=10)
    weights = [f32([3.0, 4.0])]
    for change in changes:
        weights.append((weights[-1] * np.float32(1 + change)).astype(np.float32))
    expected = []
    for index in range(1, len(weights)):
        first = index - 1 if num_steps is None else index - num_steps // 10
        if first == index:
            continue
        new, before = (weights[at].astype(np.float64) for at in (index, max(0, first)))
        ratio = np.linalg.norm(new - before) / (np.linalg.norm(before) + 1e-9)
        if ratio > 10 or ratio < 1e-8:
            expected.append(10 + 10 * index)
    root = Store.open(tmp_path / str(next(NUMBERS)), create=True)
    assert alone(root, config, weights, WEIGHT, "weights") == expected
    assert capture_needs([config])[0].collections == ("weights",)


def test_activations_are_not_weights(folder_store: Store) -> None:
    config = amazons("weight_update_ratio", full_tensors=True)
    assert alone(folder_store, config, [[1.0], [1.0]], OUTPUT, "activations") == []


@given(data=st.data())
def test_small_tensors_that_are_compared_together_give_what_each_gives_alone(
    data: st.DataObject,
) -> None:
    dtypes = st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.bool_, np.complex64])
    shapes = st.sampled_from([(), (1,), (3,), (0,), (2, 2), (65,), (8, 9)])
    rows = []
    for number in range(data.draw(st.integers(1, 6))):
        shape, dtype = data.draw(shapes), data.draw(dtypes)
        new = data.draw(arrays.arrays(dtype, shape))
        kind = data.draw(st.sampled_from(["same", "other", "none", "shape"]))
        old: NDArray[Any] | None = new
        if kind == "other":
            old = data.draw(arrays.arrays(data.draw(dtypes), shape))
        elif kind != "same":
            old = None if kind == "none" else new.reshape(-1, 1)
        rows.append((tensor(f"{number}.weight", "weights"), new, old))
    block = SavedBlock.of(
        block_of([Row(0, info, [1.0]) for info, _, _ in rows]),
        [new for _, new, _ in rows],
        [old for _, _, old in rows],
    )
    state, findings = compare_elements("x", "good", (1e-5, 1e-8), SimilarAcrossRunsState(), block)
    alone = [
        finding
        for row in range(len(block))
        for finding in compare_elements(
            "x", "good", (1e-5, 1e-8), SimilarAcrossRunsState(), block.take(np.array([row]))
        )[1]
    ]
    assert list(findings) == alone
    assert state.compared == any(old is not None for _, _, old in rows)


def test_small_tensors_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similar_across_runs, "_apart", None)
    infos = [tensor(f"{number}.weight", "weights") for number in range(100)]
    block = SavedBlock.of(
        block_of([Row(0, info, [1.0]) for info in infos]), [f32([1.0])] * 100, [f32([2.0])] * 100
    )
    _, findings = compare_elements("x", "good", (1e-5, 1e-8), SimilarAcrossRunsState(), block)
    assert len(findings) == 100
    assert (findings[7].tensor, findings[7].value) == ("7.weight", 1.0)
    assert "1 of 1 elements of 7.weight are not those of run good" in findings[7].message
    assert isinstance(findings, FindingRows)  # built when they are read, and without the tensors
    assert not any(isinstance(value, SavedBlock) for value in vars(findings).values())
