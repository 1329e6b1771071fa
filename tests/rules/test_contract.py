"""The contract of every rule in the registry."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.runs import INFOS, LAST, Event, follow, runs, segments, splits
from tests.sdk.format.blocks import Row, block_of
from watchstep.format.block import Block, concatenate
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.registry import RULES
from watchstep_rules.rule import AnyRule, Finding, Params, Rule, State

BYTES_PER_TENSOR = 128
OF_OTHER_ROWS = re.compile(
    r"; the input contained|; first non-finite output|; weights of|; all \d+ recorded|; the only recorded"
    r"|; the gradient scaler skipped|; the optimizer did not apply|; the update of|; no optimizer step"
)
every_rule = pytest.mark.parametrize("name", sorted(RULES))


def eager(params: type[Params]) -> dict[str, Any]:
    """Parameters with many findings on a synthetic run: short windows and warm-ups, low thresholds."""
    wanted = {
        "window": 3,
        "warmup": 3,
        "growth": 1.5,
        "threshold": 10.0,
        "relative": 0.9,
        "steps": 2,
        "examples": 1,
        "slope": 0.9,
        "converged": 0.0,
        "large": 1.1,
        "num_steps": 2,
        "patience_train": 3,
        "patience_validation": 2,
        "samples": 1,
        "max_threshold": 0.5,
        "skips": 2,
        "records": 2,
        "misprediction": 0.5,
        "apart": 2.0,
        "lasting": 2,
        "deviations": 0.5,
        "baseline": {
            "tensors": {
                "loss": {"shape": (), "statistic": "mean", "phases": [None, (1.0, 2.0), (0.5, 0.6)]},
                "first.weight": {"shape": (8, 8), "statistic": "rms", "phases": [(1.0, 2.0)] * 3},
            }
        },
        "reference": {
            "loss": [(0, 1.0), (1, 0.2), (2, 0.2), (3, 0.1), (4, 0.1), (LAST, 2.0)],
            "first.weight": [(2, 0.5)],
            "optimizer:learning_rate/0": [(0, 0.1)],
            "optimizer:has_state": [(0, 0.0)],
            "gradient_scaler:scale": [(0, 8.0)],
        },
        "other_trials": {"loss": [(0, 1.0), (LAST, 2.0)]},
    }
    return {name: value for name, value in wanted.items() if name in params.model_fields}


@every_rule
@settings(max_examples=examples(16))
@given(
    events=runs(),
    hold=st.builds(MinimumDuration, steps=st.integers(1, 3), seconds=st.sampled_from([0, 0.003])),
    data=st.data(),
)
def test_splitting_a_run_changes_no_finding_and_findings_name_existing_rows(
    name: str, events: list[Event], hold: MinimumDuration, data: st.DataObject
) -> None:
    config = RuleConfig(rule=name, params=eager(RULES[name].params_type), hold=hold)
    first_split, second_split = data.draw(splits(events)), data.draw(splits(events))
    outcome = follow(config, first_split)
    event(f"findings: {bool(outcome.findings)}, transitions: {min(9, len(outcome.transitions))}")
    for split in (second_split, [[single] for single in events]):
        again = follow(config, split)
        assert (again.findings, again.notified, again.memory) == (
            outcome.findings,
            outcome.notified,
            outcome.memory,
        )
    assert outcome.memory.health is not RuleHealth.ERROR, outcome.memory.problem
    infos = {info.name: info for info in INFOS}
    for finding in outcome.findings:
        info = infos[finding.tensor]
        assert finding.rule == name
        assert (finding.module, finding.module_type) == (info.module, info.module_type)
        assert finding.tensor in finding.message
        assert not math.isnan(finding.value)
        assert not math.isnan(finding.threshold)
        assert 0 <= finding.step <= LAST
        assert finding.worker in (0, 1)


@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if rule.merge == "per_worker"))
@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_a_rule_that_takes_each_worker_by_itself_may_be_split_at_any_row(
    name: str, seed: int, share: float
) -> None:
    rule = RULES[name]
    params = rule.params_type.model_validate(eager(rule.params_type))
    block = concatenate(segments(Random(seed), 0, frozenset()))
    rows = np.arange(len(block))
    cut = int(share * len(block))
    head, tail = block.take(rows[:cut]), block.take(rows[cut:])
    whole_state, whole = rule.evaluate(params, rule.state_type(), Block.empty(), block, 0)
    state, first = rule.evaluate(params, rule.state_type(), Block.empty(), head, 0)
    state, second = rule.evaluate(params, state, head.tail(rule.lookback(params)), tail, 0)
    assert (state, alone([*first, *second])) == (whole_state, alone(whole))


def alone(findings: Sequence[Finding]) -> list[Finding]:
    """Findings without the values of other rows of their step: segments contain whole steps of a worker, arbitrary cuts do not."""
    return [
        finding.model_copy(
            update={
                "message": OF_OTHER_ROWS.split(finding.message)[0],
                "upstream": (),
                "origin": "",
                "cause_rank": (finding.cause_rank[0], 0),
            }
        )
        for finding in findings
    ]


@every_rule
def test_what_is_retained_of_a_tensor_is_eager(name: str) -> None:
    rule = RULES[name]
    deep = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"
    infos = [
        TensorInfo(f"{deep.format(layer, 7)}:gradient", ("gradients",), "gradient", shape=(8, 8))
        for layer in range(40)
    ]
    rows = [
        Row(step, info, [1.2345678901234567 * 10.0**-step, 1e-30]) for step in range(12) for info in infos
    ]
    state, _ = rule.evaluate(rule.params_type(), rule.state_type(), Block.empty(), block_of(rows), 0)
    encoded = json.dumps(state.model_dump(mode="json"), separators=(",", ":"))
    assert len(encoded) <= BYTES_PER_TENSOR * len(infos)


@every_rule
def test_a_rule_states_what_it_is_and_what_it_takes(name: str) -> None:
    rule: AnyRule = RULES[name]
    assert rule.name == name
    assert rule.summary
    assert not rule.summary.endswith(".")
    assert rule.__doc__
    assert rule.needs.collections or rule.clock  # silence is no tensor's
    assert rule.merge in ("per_worker", "watermark")
    schema = rule.params_type.model_json_schema()
    assert schema["additionalProperties"] is False
    for described in schema.get("properties", {}).values():
        assert described["description"]
        assert "default" in described


@every_rule
def test_nothing_recorded_is_nothing_found(name: str) -> None:
    rule = RULES[name]
    state, findings = rule.evaluate(rule.params_type(), rule.state_type(), Block.empty(), Block.empty(), 0)
    assert (state, findings) == (rule.state_type(), [])


def test_a_rule_without_a_lookback_of_its_own_looks_back_on_nothing() -> None:
    class Plain(Rule[Params, State]):
        def evaluate(self, params: Params, state: State, context: Block, block: Block, now: int) -> Any:
            raise NotImplementedError

    assert Plain().lookback(Params()) == 0


T = TypeVar("T", bound=Params)


class Counted(State):
    count: int = 0


class Bounded(Params):
    bound: float = 1.0


class Counting(Rule[T, Counted]):
    def evaluate(self, params: T, state: Counted, context: Block, block: Block, now: int) -> Any:
        raise NotImplementedError


class BoundedCounting(Counting[Bounded]):
    pass


class BoundedChild(BoundedCounting):
    pass


class Untyped(Rule):  # type: ignore[type-arg]  # as users may write it
    def evaluate(self, params: Params, state: State, context: Block, block: Block, now: int) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("rule", "params", "state"),
    [
        (Counting, Params, Counted),
        (BoundedCounting, Bounded, Counted),
        (BoundedChild, Bounded, Counted),
        (Untyped, Params, State),
    ],
)
def test_the_types_of_parameters_and_state_are_the_type_arguments(
    rule: type[AnyRule], params: type[Params], state: type[State]
) -> None:
    assert (rule.params_type, rule.state_type) == (params, state)
