"""Python rules over full tensors: what the class receives in its process, what it may declare, and its limits."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from tests.rules.custom.programs import HEAD, python
from tests.rules.runs import Event, Outcome, Rows, Watermark
from tests.rules.saved import ATTEMPT, OUTPUT, WEIGHT, evaluations_of, mark, save
from tests.sdk.format.blocks import block_of, tensor
from watchstep.store.store import Store
from watchstep_rules.config.attached import capture_needs
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.protocol import arrays_from_bytes, arrays_to_bytes
from watchstep_rules.engine.judge import RuleHealth, judge_inputs
from watchstep_rules.engine.rule_inputs import JudgingProgress, RuleInputs
from watchstep_rules.engine.saved_tensors import ReferenceRun, SavedTensors
from watchstep_rules.rule_files import rule_file

ECHO = (
    HEAD
    + '''
from hashlib import sha256
from watchstep_rules import SavedBlock, TensorNeeds


def digest(array):
    """Type, shape and bits of an array."""
    if array is None:
        return "none"
    return f"{array.dtype.str}{array.shape}{sha256(array.tobytes()).hexdigest()}"


class EchoParams(Params):
    every: int = 10
    modes: tuple[str, ...] = ("train",)
    run: str = ""
    before: int = 0
    megabytes: int = 0


class EchoState(State):
    judged: int = 0


class Echo(Rule[EchoParams, EchoState]):
    """Reports for each row what it received."""

    name = "echo"
    summary = "a tensor was saved"
    merge = "per_worker"

    def needed(self, params):
        return Needs(
            collections=("activations", "weights"),
            tensors=TensorNeeds(params.every, params.modes, reference=bool(params.run)),
        )

    def reference(self, params):
        return params.run

    def lookback(self, params):
        return params.before

    def evaluate(self, params, state, context, block, now):
        assert isinstance(context, SavedBlock) and isinstance(block, SavedBlock)
        np.ones(params.megabytes << 17)
        findings = [
            finding_at(
                "echo", block, row, value=float(len(context)), threshold=0.0,
                message=f"{digest(block.values[row])} {digest(block.references[row])}"
                + "".join(f" {digest(value)}" for value in context.values),
            )
            for row in range(len(block))
        ]
        return EchoState(judged=state.judged + len(block)), findings
'''
)


def echo(**fields: Any) -> RuleConfig:
    params = {
        name: fields.pop(name)
        for name in list(fields)
        if name in ("every", "modes", "run", "before", "megabytes")
    }
    return python(ECHO, "Echo", params=params, **fields)


def digest(array: NDArray[Any] | None) -> str:
    if array is None:
        return "none"
    return f"{array.dtype.str}{array.shape}{sha256(array.tobytes()).hexdigest()}"


def at_once(*steps: int) -> list[list[Event]]:
    return [[Rows(block_of([mark(step) for step in steps])), Watermark(max(steps) + 1)]]


ARRAYS: list[NDArray[Any]] = [
    np.array([[1.5, -0.0], [np.nan, np.inf]], np.float32),
    np.array([True, False, True]),
    np.array([0.1, -np.inf], np.float16),
    np.array([2**63 - 1, -1], np.int64),
    np.array([1e308], np.float64),
    np.array([1 + 2j], np.complex64),
    np.array(2.0, np.float32),
    np.empty((0, 4), np.float32),
]


def test_values_and_references_arrive_bit_by_bit(folder_store: Store) -> None:
    infos = {
        tensor(f"{number}:output", "activations", order=number, shape=array.shape): array
        for number, array in enumerate(ARRAYS)
    }
    others = {info: array for number, (info, array) in enumerate(infos.items()) if number % 2}
    mine, other = folder_store.child("p/mine/"), folder_store.child("p/good/")
    save(mine, 10, infos)
    save(other, 10, others, attempt="b1")
    bits = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000
    save(mine, 20, {WEIGHT: bits}, dtype="BF16")
    evaluations = evaluations_of(mine, open_reference=lambda run: ReferenceRun(run, "b1", other))
    outcome = evaluations.follow(echo(run="good"), at_once(10, 20))
    assert outcome.memory.health is RuleHealth.OK, outcome.memory.problem
    expected = {
        info.name: f"{digest(array)} {digest(array if info in others else None)}"
        for info, array in infos.items()
    }
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    expected[WEIGHT.name] = f"{digest(widened)} none"
    assert {finding.tensor: finding.message for finding in outcome.findings} == expected


def test_the_context_arrives_with_its_values(folder_store: Store) -> None:
    for step in (10, 20, 30):
        save(folder_store, step, {OUTPUT: np.full((2, 2), step, np.float32)})
    evaluations: list[list[Event]] = [
        [Rows(block_of([mark(step)])), Watermark(step + 1)] for step in (10, 20, 30)
    ]
    outcome = evaluations_of(folder_store).follow(echo(before=1), evaluations)
    digests = [digest(np.full((2, 2), step, np.float32)) for step in (10, 20, 30)]
    assert [finding.message for finding in outcome.findings] == [
        f"{digests[0]} none",
        f"{digests[1]} none {digests[0]}",
        f"{digests[2]} none {digests[1]}",
    ]
    assert outcome.memory.state is not None
    assert outcome.memory.state["data"] == {"judged": 3}


@pytest.mark.parametrize(
    "change",
    [{"data": {"judged": 2}, "version": 7}, {"version": "damaged"}],
    ids=["of another version of the class", "damaged"],
)
def test_a_state_that_cannot_be_read_is_rebuilt_from_the_context(
    folder_store: Store, change: dict[str, Any]
) -> None:
    for step in (10, 20):
        save(folder_store, step, {OUTPUT: np.ones((2, 2), np.float32)})
    config = echo(before=1)
    outcome = evaluations_of(folder_store).follow(config, at_once(10))
    assert outcome.memory.state is not None
    memory = outcome.memory.model_copy(update={"state": {**outcome.memory.state, **change}})
    saved = SavedTensors(folder_store, ATTEMPT)
    rows = RuleInputs(block_of([mark(10)]), block_of([mark(20)]), JudgingProgress(11, 21, 7), saved)
    verdict = judge_inputs(config, memory, rows)
    assert verdict.memory.health is RuleHealth.OK, verdict.memory.problem
    assert verdict.memory.state is not None
    assert verdict.memory.state["data"] == {"judged": 2}


def test_an_object_without_chosen_tensors_is_judged_as_nothing(folder_store: Store) -> None:
    save(folder_store, 10, {replace(OUTPUT, collections=("other",)): np.ones(3, np.float32)})
    outcome = evaluations_of(folder_store).follow(echo(), at_once(10))
    assert (outcome.findings, outcome.memory.health) == ([], RuleHealth.NO_DATA)


def test_the_memory_limit_of_the_class_holds(folder_store: Store) -> None:
    save(folder_store, 10, {OUTPUT: np.ones((2, 2), np.float32)})
    save(folder_store, 20, {OUTPUT: np.ones((1024, 1024), np.float32)})
    config = echo(megabytes=256, memory_mb=128)
    outcome = evaluations_of(folder_store).follow(config, at_once(10))
    assert outcome.memory.health is RuleHealth.ERROR
    assert "MemoryError" in outcome.memory.problem
    assert (
        evaluations_of(folder_store).follow(echo(memory_mb=128), at_once(10, 20)).memory.health
        is RuleHealth.OK
    )


@pytest.mark.ci
def test_values_beyond_the_memory_limit_are_reported(folder_store: Store) -> None:
    shape = (4096, 2048)
    for step in (10, 20, 30, 40):
        save(folder_store, step, {replace(OUTPUT, shape=shape): np.ones(shape, np.float32)})
    outcome: Outcome = evaluations_of(folder_store).follow(echo(memory_mb=100), at_once(10, 20, 30, 40))
    assert outcome.memory.health is RuleHealth.ERROR
    assert (
        "the saved tensors of this evaluation have 128 MiB, which exceeds its memory_mb of 100"
        in outcome.memory.problem
    )
    assert (
        evaluations_of(folder_store).follow(echo(memory_mb=100), at_once(10)).memory.health is RuleHealth.OK
    )


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"every": 0}, "tensors.every: Input should be greater than or equal to 1"),
        ({"every": -3}, "tensors.every: Input should be greater than or equal to 1"),
        ({"every": 2**31}, f"tensors.every: Input should be less than {2**31}"),
        (
            {"modes": ["train", "test"]},
            "tensors.modes.1: Input should be 'train', 'eval', 'predict' or 'global'",
        ),
        ({"modes": ["train"] * 5}, "tensors.modes: Tuple should have at most 4 items"),
        ({"run": "r" * 129}, "tensors.reference: String should have at most 128 characters"),
    ],
    ids=str,
)
def test_impossible_declarations_are_rejected_when_the_rule_file_is_loaded(
    tmp_path: Any, params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        echo(**params)
    assert reason in str(caught.value)
    (tmp_path / "echo.py").write_text(ECHO)
    rule = {"rule": "python", "params": {"file": "echo.py", "class": "Echo", "params": params}}
    (tmp_path / "rules.yaml").write_text(json.dumps({"rules": [rule]}))
    with pytest.raises(Exception, match=r"rules\.yaml") as loading:
        rule_file.load(tmp_path / "rules.yaml")
    assert reason in str(loading.value)


def test_words_that_no_control_document_can_have_are_rejected() -> None:
    with pytest.raises(ValidationError, match="collections"):
        python(ECHO.replace('("activations", "weights")', '("a" * 1001,)'), "Echo")


def test_declarations_become_needs_of_the_recorder() -> None:
    (need,) = capture_needs([echo(every=7, modes=["eval"])])
    assert (need.rule, need.collections, need.every, need.modes) == (
        "python",
        ("activations", "weights"),
        7,
        ("eval",),
    )


@settings(max_examples=30)
@given(
    st.lists(
        st.none()
        | st.tuples(
            st.sampled_from(["?", "<i1", "<f2", "<f4", "<f8", "<c8", "<u8"]),
            st.lists(st.integers(0, 3), max_size=4),
        ),
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_arrays_are_packed_bit_by_bit(described: list[Any], random: Any) -> None:
    arrays = [
        None
        if entry is None
        else np.frombuffer(
            random.randbytes(int(np.prod(entry[1])) * np.dtype(entry[0]).itemsize) or b"", entry[0]
        ).reshape(entry[1])
        for entry in described
    ]
    again = arrays_from_bytes(bytearray(arrays_to_bytes(arrays)))
    assert [digest(array) for array in again] == [digest(array) for array in arrays]
