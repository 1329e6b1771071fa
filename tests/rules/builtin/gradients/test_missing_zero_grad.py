from __future__ import annotations

from pathlib import Path

from torch import nn, optim

from tests.rules.recording import evaluate_training
from tests.rules.runs import all_at_once, in_steps
from tests.sdk.format.blocks import Row, tensor
from tests.sdk.training import batches, small_model
from watchstep import Hook
from watchstep_rules.config.rule_config import RuleConfig

STALE_GRADIENTS = tensor("gradients:stale", "metrics", shape=())


def trained(hook: Hook, *, clears: bool, micro_batches: int = 1) -> None:
    model = small_model()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    hook.watch(model, optimizer)
    for x, y in batches(15):
        if clears:
            optimizer.zero_grad(set_to_none=False)
        for _ in range(micro_batches):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_loop_without_zero_grad_and_its_twin(tmp_path: Path) -> None:
    found = evaluate_training(
        lambda hook: trained(hook, clears=False), "missing_zero_grad", tmp_path / "faulty"
    )
    assert [finding.step for finding in found] == list(range(6, 15))
    assert found[0].message == (
        "gradients:stale: at 6 steps in a row the gradients included those of the previous step; "
        "they were not cleared"
    )
    for passes in (1, 4):
        twin = evaluate_training(
            lambda hook, passes=passes: trained(hook, clears=True, micro_batches=passes),  # type: ignore[misc]  # mypy does not infer it
            "missing_zero_grad",
            tmp_path / f"{passes}",
        )
        assert twin == []


def stale_steps(values: list[float]) -> list[int]:
    rows = [Row(step, STALE_GRADIENTS, [value]) for step, value in enumerate(values)]
    config = RuleConfig(rule="missing_zero_grad", params={"records": 3})
    return [finding.step for finding in all_at_once(config, in_steps(rows)).findings]


def test_a_step_that_was_cleared_begins_anew() -> None:
    assert stale_steps([1, 1, 1, 1, 0, 1, 1, 1]) == [2, 3, 7]
    assert stale_steps([1, 1, 0, 1, 1, 0]) == []


def test_other_metrics_are_ignored() -> None:
    rows = [Row(step, tensor("accuracy", "metrics", shape=()), [1.0]) for step in range(20)]
    assert all_at_once(RuleConfig(rule="missing_zero_grad"), in_steps(rows)).findings == []
