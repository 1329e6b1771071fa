"""An expert of a mixture without examples for long is reported once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn, optim

from tests.rules.builtin.activations.test_mixture_of_experts import Mixture
from tests.rules.recording import EVERYTHING
from tests.rules.runs import Event, Rows, Watermark, all_at_once, follow
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep import Hook, open_run
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase

(DEFAULT,) = [config for config in DEFAULT_RULES if config.rule == "starved_expert"]
SOON = RuleConfig(rule="starved_expert", params={"records": 3})
EXPERTS = 4


def recorded(folder: Path, *, computes_all: bool, starves_last: bool, steps: int = 60) -> Block:
    torch.manual_seed(0)
    model = Mixture(computes_all=computes_all)
    model.starves_last = starves_last
    optimizer = optim.AdamW(model.parameters(), 2e-3)
    truth = torch.randn(12, 3)
    with Hook(folder, config=EVERYTHING) as hook:
        hook.watch(model, optimizer)
        for _ in range(steps):
            x = torch.randn(24, 12)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x @ truth).argmax(1)).backward()
            optimizer.step()
    return open_run(hook.run_url).rows()


@pytest.mark.parametrize("computes_all", [False, True])
def test_an_expert_without_examples_is_reported_once(computes_all: bool, tmp_path: Path) -> None:
    assert DEFAULT.severity == "info"
    outcome = all_at_once(DEFAULT, recorded(tmp_path, computes_all=computes_all, starves_last=True))
    (change,) = outcome.notified
    assert change.phase is Phase.FIRING
    assert change.step == 49
    assert change.finding is not None
    assert change.finding.message.startswith(
        f"{change.finding.tensor}: experts.3 has had no gradient at 50 records in a row, while 3 of its 3 sibling experts have one"
    )


def test_experts_that_all_get_examples_are_not_reported(tmp_path: Path) -> None:
    rows = recorded(tmp_path, computes_all=False, starves_last=False, steps=20)
    assert all_at_once(SOON, rows).findings == []


def of_expert(
    number: int, role: str, *, path: str = "experts", shape: tuple[int, ...] = (8, 8)
) -> TensorInfo:
    collection = {"gradient": "gradients", "update": "updates"}[role]
    return tensor(f"{path}.{number}.up.weight:{role}", collection, role=role, shape=shape, order=number)


def run(starved: dict[int, set[int]], steps: int = 12, **described: object) -> Block:
    """Experts of which some have no gradient at some steps."""
    rows = []
    for step in range(steps):
        for number in range(EXPERTS):
            gradient, update = (of_expert(number, role, **described) for role in ("gradient", "update"))  # type: ignore[arg-type]
            if number not in starved.get(step, set()):
                rows.append(Row(step, gradient, [1.0]))
            elif number % 2:
                rows.append(Row(step, gradient, [0.0]))
            rows.append(Row(step, update, [1.0]))
    return block_of(rows)


def messages_by_step(block: Block) -> list[tuple[int, str]]:
    found = all_at_once(SOON, block).findings
    return [(finding.step, finding.tensor.partition(".up")[0]) for finding in found]


def test_an_expert_is_starved_where_it_has_no_gradient_or_zeros_at_records_in_a_row() -> None:
    assert messages_by_step(run({step: {2} for step in (2, 3, 5, 6)})) == []
    for number in (2, 3):
        steps = messages_by_step(run({step: {number} for step in range(4, 8)}))
        assert steps == [(6, f"experts.{number}"), (7, f"experts.{number}")]


def test_a_starved_expert_is_reported_once_in_a_run() -> None:
    first = {step: {2} for step in range(4)}
    assert messages_by_step(run({**first, **{step: {1, 3} for step in range(6, 12)}})) == [
        (2, "experts.2"),
        (3, "experts.2"),
    ]


def test_where_no_sibling_has_a_gradient_nothing_is_reported() -> None:
    everywhere = {step: set(range(EXPERTS)) for step in range(12)}
    assert messages_by_step(run(everywhere)) == []
    alone = {step: {2} for step in range(12)}
    assert messages_by_step(run(alone, path="layers")) == []  # no experts
    assert messages_by_step(run(alone, shape=(8,))) == []


def test_steps_that_arrive_one_by_one_are_judged_as_those_that_arrive_together() -> None:
    block = run({step: {0, 3} if step < 7 else {3} for step in range(10)})
    steps: list[list[Event]] = [
        [Rows(block.where(block.step == step)), Watermark(step)] for step in range(12)
    ]
    outcome, together = follow(SOON, steps), all_at_once(SOON, block)
    assert outcome.findings == together.findings
    assert outcome.memory.state == together.memory.state
    assert {finding.tensor for finding in outcome.findings} == {
        f"experts.{number}.up.weight:update" for number in (0, 3)
    }
