"""Layers that get no gradient: experts without examples and branches that are not used are no fault; layers that are used are one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.rules.recording import EVERYTHING, evaluate_training
from tests.rules.runs import all_at_once, follow, one_by_one
from tests.rules.trainings.parts import Task
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep import Hook, open_run
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase
from watchstep_rules.signals.tensor_selection import expert_of, kind_of_expert

# Experts without examples are no fault; layers that are used and get no gradient are one, also next to such experts.


STEPS = 60
ABOUT_GRADIENTS = ("weight_not_updating", "gradients_cease", "vanishing_gradient")


class Mixture(nn.Module):
    """Each example is routed to one of four experts; the last is not chosen while it is starved."""

    def __init__(self, *, computes_all: bool) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)
        )
        self.computes_all = computes_all
        self.detaches_stem = False
        self.starves_last = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(x))
        if self.detaches_stem:
            hidden = hidden.detach()
        weights = self.router(hidden).softmax(1)
        best = torch.arange(len(x)) % (3 if self.starves_last else 4)
        output = hidden
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if self.computes_all:
                output = output + expert(hidden) * (weights[:, number] * chosen).unsqueeze(1)
            elif chosen.any():
                update = weights[chosen, number].unsqueeze(1) * expert(hidden[chosen])
                output = output.index_add(0, torch.where(chosen)[0], update)
        logits: Tensor = self.head(output)
        return logits


def recorded_mixture(
    folder: Path,
    *,
    computes_all: bool = False,
    detached_from: int = STEPS,
    starved_from: int = 0,
    steps: int = STEPS,
) -> Block:
    """The rows of a mixture whose stem is detached and whose last expert is starved from a step on."""
    torch.manual_seed(0)
    model = Mixture(computes_all=computes_all)
    optimizer = optim.AdamW(model.parameters(), 2e-3)
    truth = torch.randn(12, 3)
    with Hook(folder, config=EVERYTHING) as hook:
        hook.watch(model, optimizer)
        for step in range(steps):
            model.detaches_stem = step >= detached_from
            model.starves_last = step >= starved_from
            x = torch.randn(24, 12)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x @ truth).argmax(1)).backward()
            optimizer.step()
    return open_run(hook.run_url).rows()


def alarms(folder: Path, **options: Any) -> dict[str, set[str]]:
    """The layers for which each rule's alert fires, of rules whose severity is warning or critical."""
    rows = recorded_mixture(folder, **options)
    found: dict[str, set[str]] = {}
    for config in DEFAULT_RULES:
        if config.rule in ABOUT_GRADIENTS and config.severity != "info":
            outcome = all_at_once(config, rows)
            if any(change.phase is Phase.FIRING for change in outcome.notified):
                found[config.rule] = {finding.module for finding in outcome.findings}
    return found


@pytest.mark.ci
@pytest.mark.parametrize("computes_all", [False, True])
def test_an_expert_without_examples_raises_no_alarm(computes_all: bool, tmp_path: Path) -> None:
    assert alarms(tmp_path / "always", computes_all=computes_all) == {}
    assert alarms(tmp_path / "later", computes_all=computes_all, starved_from=30) == {}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("detached_from", "starved_from", "rule"), [(0, 0, "weight_not_updating"), (30, 30, "gradients_cease")]
)
def test_a_used_layer_without_a_gradient_alarms_beside_an_expert_without_examples(
    detached_from: int, starved_from: int, rule: str, tmp_path: Path
) -> None:
    assert alarms(tmp_path, detached_from=detached_from, starved_from=starved_from) == {rule: {"stem"}}


# An expert of a mixture without examples for long is reported once.


(DEFAULT,) = [config for config in DEFAULT_RULES if config.rule == "starved_expert"]
SOON = RuleConfig(rule="starved_expert", params={"records": 3})
EXPERTS = 4


@pytest.mark.ci
@pytest.mark.parametrize("computes_all", [False, True])
def test_an_expert_without_examples_is_reported_once(computes_all: bool, tmp_path: Path) -> None:
    assert DEFAULT.severity == "info"
    outcome = all_at_once(DEFAULT, recorded_mixture(tmp_path, computes_all=computes_all))
    (change,) = outcome.notified
    assert change.phase is Phase.FIRING
    assert change.step == 49
    assert change.finding is not None
    assert change.finding.message.startswith(
        f"{change.finding.tensor}: experts.3 has had no gradient at 50 records in a row, while 3 of its 3 sibling experts have one"
    )


def test_experts_that_all_get_examples_are_not_reported(tmp_path: Path) -> None:
    rows = recorded_mixture(tmp_path, starved_from=STEPS, steps=20)
    assert all_at_once(SOON, rows).findings == []


def of_expert(
    number: int, role: str, *, path: str = "experts", shape: tuple[int, ...] = (8, 8)
) -> TensorInfo:
    collection = {"gradient": "gradients", "update": "updates"}[role]
    return tensor(f"{path}.{number}.up.weight:{role}", collection, role=role, shape=shape, order=number)


def run_of_experts(starved: dict[int, set[int]], steps: int = 12, **described: object) -> Block:
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
    assert messages_by_step(run_of_experts({step: {2} for step in (2, 3, 5, 6)})) == []
    for number in (2, 3):
        steps = messages_by_step(run_of_experts({step: {number} for step in range(4, 8)}))
        assert steps == [(6, f"experts.{number}"), (7, f"experts.{number}")]


def test_a_starved_expert_is_reported_once_in_a_run() -> None:
    first = {step: {2} for step in range(4)}
    assert messages_by_step(run_of_experts({**first, **{step: {1, 3} for step in range(6, 12)}})) == [
        (2, "experts.2"),
        (3, "experts.2"),
    ]


def test_where_no_sibling_has_a_gradient_nothing_is_reported() -> None:
    everywhere = {step: set(range(EXPERTS)) for step in range(12)}
    assert messages_by_step(run_of_experts(everywhere)) == []
    alone = {step: {2} for step in range(12)}
    assert messages_by_step(run_of_experts(alone, path="layers")) == []  # no experts
    assert messages_by_step(run_of_experts(alone, shape=(8,))) == []


def test_steps_that_arrive_one_by_one_are_judged_as_those_that_arrive_together() -> None:
    block = run_of_experts({step: {0, 3} if step < 7 else {3} for step in range(10)})
    outcome, together = follow(SOON, one_by_one(block)), all_at_once(SOON, block)
    assert outcome.findings == together.findings
    assert outcome.memory.state == together.memory.state
    assert {finding.tensor for finding in outcome.findings} == {
        f"experts.{number}.up.weight:update" for number in (0, 3)
    }


# A branch amid layers that learn may get no gradient for good: an auxiliary head whose loss ends, or a branch that is not selected.


BRANCH_STEPS = 90


class Branches(nn.Module):
    """Two branches that are always computed; the second gets no gradient from a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(12, 32), nn.Linear(32, 3)
        self.main, self.other = (
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.stem(x))
        return self.main(hidden), self.other(hidden)


@pytest.mark.ci
@pytest.mark.parametrize("ends", [0, 40])
@pytest.mark.parametrize("is_auxiliary", [True, False])
def test_a_branch_that_is_computed_and_not_used_raises_no_alarm(
    is_auxiliary: bool, ends: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = optim.AdamW(model.parameters(), 2e-3)
    truth = torch.randn(12, 3)
    with Hook(tmp_path, config=EVERYTHING) as hook:
        hook.watch(model, optimizer)
        for step in range(BRANCH_STEPS):
            x = torch.randn(32, 12)
            optimizer.zero_grad()
            main, other = model(x)
            is_used = step < ends
            logits = model.head(main + other if is_used and not is_auxiliary else main)
            loss = nn.functional.cross_entropy(logits, (x @ truth).argmax(1))
            (loss + other.square().mean() if is_used and is_auxiliary else loss).backward()
            optimizer.step()
    outcomes = backtest(open_run(hook.run_url).rows(), DEFAULT_RULES)
    fired = {
        outcome.config.name
        for outcome in outcomes
        if outcome.config.severity != "info"
        and any(change.phase is Phase.FIRING for change in outcome.transitions)
    }
    assert fired == set()


ONSET = 60


class Parts(nn.Module):
    """An encoder of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
        self.way: Callable[[Parts, Tensor], Tensor] = lambda parts, x: parts.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.way(self, x))
        return found


def without_gradients(parts: Parts, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = parts.encoder(x)
    return found


def ceased(
    folder: Path,
    change: Callable[[Parts], None],
    *,
    zeros: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> list[tuple[int, str]]:
    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model = Parts()
        updates = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        hook.watch(model, updates)
        for step, (x, y) in enumerate(Task(1).batches(steps=100)):
            if step == ONSET:
                change(model)
            updates.zero_grad(set_to_none=not zeros)
            nn.functional.cross_entropy(model(x), y).backward()
            updates.step()

    outcome = evaluate_training(train, "gradients_cease", folder)
    return [(finding.step, finding.tensor) for finding in outcome]


BOTH = [(ONSET + 3, "encoder.0.weight:update"), (ONSET + 3, "encoder.2.weight:update")]


@pytest.mark.ci
def test_an_encoder_under_no_grad_from_some_step_on(tmp_path: Path) -> None:
    def change(model: Parts) -> None:
        model.way = without_gradients

    assert ceased(tmp_path / "none", change)[:2] == BOTH
    assert ceased(tmp_path / "zeros", change, zeros=True, optimizer=torch.optim.AdamW)[:2] == BOTH


@pytest.mark.ci
def test_what_is_frozen_detached_later_or_left_out_is_ignored(tmp_path: Path) -> None:
    def freeze(model: Parts) -> None:
        model.encoder.requires_grad_(requires_grad=False)

    def leave_out(model: Parts) -> None:
        model.way = lambda _, x: torch.tanh(x @ torch.ones(20, 32))

    def middle(model: Parts) -> None:
        inner = model.encoder[2]
        model.way = lambda parts, x: parts.encoder[0](x).tanh() + inner(parts.encoder[0](x).tanh()).detach()

    assert ceased(tmp_path / "frozen", freeze) == []
    assert ceased(tmp_path / "not computed", leave_out) == []
    assert ceased(tmp_path / "amid others", middle) == []


def test_a_head_that_is_trained_alone_from_the_start_is_no_case_of_it(tmp_path: Path) -> None:
    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model = Parts()
        model.way = without_gradients
        updates = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.watch(model, updates)
        for x, y in Task(1).batches(steps=60):
            updates.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            updates.step()

    assert evaluate_training(train, "gradients_cease", tmp_path) == []


@pytest.mark.parametrize(
    ("name", "kind", "expert"),
    [
        ("layers.0.mlp.experts.12.w1", "layers.0.mlp.experts.*.w1", "layers.0.mlp.experts.12"),
        ("a.MyExpert_list.3.experts.1.b.2.c", "a.MyExpert_list.*.experts.*.b.2.c", "a.MyExpert_list.3.experts.1"),
        ("experts.1", "", ""),
        ("experts.one.weight", "", ""),
        ("layers.0.weight", "", ""),
        # A regular expression of the same meaning takes minutes for this name.
        ("expert" * 680, "", ""),
        ("expert" * 680 + ".1.w", "expert" * 680 + ".*.w", "expert" * 680 + ".1"),
    ],
)  # fmt: skip
def test_experts_are_told_by_their_names(name: str, kind: str, expert: str) -> None:
    assert (kind_of_expert(name), expert_of(name)) == (kind, expert)
