from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn, optim

from tests.rules.recording import EVERYTHING, evaluate_training
from tests.rules.runs import all_at_once, in_steps
from tests.sdk.format.blocks import Row, tensor
from tests.sdk.training import batches, small_model
from watchstep import Hook, open_run
from watchstep_rules.builtin.weights.optimizer_not_stepping import OptimizerNotSteppingParams
from watchstep_rules.config.rule_config import RuleConfig

RULE = "optimizer_not_stepping"
OVERDUE = tensor("updates:overdue", "metrics", shape=())
UPDATED = 12


def trained(
    hook: Hook,
    *,
    passes: int = 230,
    updates: int = UPDATED,
    micro_batches: int = 1,
    logs: bool = True,
    by_hand: bool = False,
    factor: float = 1.0,
    again: int = 0,
) -> None:
    """``updates`` steps, then only passes, and ``again`` more steps."""
    model = small_model()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    hook.watch(model, optimizer)
    for number, (x, y) in enumerate(batches(updates * micro_batches + passes + again)):
        loss = nn.functional.cross_entropy(model(x), y)
        if number >= updates * micro_batches:
            loss = loss * factor
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        if logs:
            hook.log(loss=loss)
        past, rest = divmod(number + 1, micro_batches)
        if past <= updates or number >= updates * micro_batches + passes:
            if rest == 0:
                optimizer.step()
        elif by_hand:
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.data.add_(parameter.grad, alpha=-1e-3)
        optimizer.zero_grad()


def test_a_loop_whose_optimizer_steps_no_more(tmp_path: Path) -> None:
    (finding,) = evaluate_training(trained, RULE, tmp_path)
    assert (finding.step, finding.tensor, finding.value) == (UPDATED, "updates:overdue", 200.0)
    assert finding.message == (
        f"updates:overdue: 200 backward passes since step {UPDATED - 1}, and a training loss is logged for them, but no "
        "optimizer has stepped and no weight changes"
    )


def test_the_alert_ends_when_the_optimizer_steps_again(tmp_path: Path) -> None:
    with Hook(tmp_path, config=EVERYTHING) as hook:
        trained(hook, again=3)
    assert not hook.health["faults"]
    block = open_run(hook.run_url).rows()
    (metric,) = (number for number, info in enumerate(block.catalogue) if info.name == OVERDUE.name)
    rows = block.where(block.tensor == metric)
    assert rows.step.tolist() == [UPDATED, UPDATED + 1]
    assert rows.statistics.mean.tolist() == [200.0, 0.0]


@pytest.mark.parametrize(
    "how",
    [
        {"logs": False},
        {"by_hand": True},
        {"passes": 190},
        {"factor": float("nan")},
        {"updates": 0},
        {"micro_batches": 5},
    ],
    ids=str,
)
def test_loops_that_do_so_on_purpose(tmp_path: Path, how: dict[str, float]) -> None:
    assert evaluate_training(lambda hook: trained(hook, **how), RULE, tmp_path) == []  # type: ignore[arg-type]


def test_only_rows_of_the_metric_that_are_over_the_limit_count() -> None:
    other = tensor("overdue", "metrics", shape=())
    rows = [
        Row(3, OVERDUE, [200.0]),
        Row(4, OVERDUE, [0.0]),
        Row(5, other, [900.0]),
        Row(6, OVERDUE, [400.0]),
    ]
    config = RuleConfig(rule=RULE, params={"passes": 300})
    assert [finding.step for finding in all_at_once(config, in_steps(rows)).findings] == [6]
    changes = all_at_once(RuleConfig(rule=RULE), in_steps(rows[:2])).transitions
    assert [(change.step, change.phase) for change in changes] == [(3, "firing"), (4, "resolved")]


@pytest.mark.parametrize("params", [{"passes": 199}, {"x": 1}])
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OptimizerNotSteppingParams.model_validate(params)
