from __future__ import annotations

from pathlib import Path

import torch
from torch import nn, optim

from tests.rules.recording import evaluate_training
from tests.rules.runs import all_at_once, in_steps, steps_of
from tests.sdk.format.blocks import Row, tensor
from watchstep import Hook
from watchstep_rules.config.rule_config import RuleConfig

WORDS = tensor("words:output", "activations")


def trained(hook: Hook, longest: int) -> None:
    """Train on sentences of one to so many words, padded to ten."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, padding_idx=3), nn.Flatten(), nn.Linear(40, 2))
    optimizer = optim.SGD(model.parameters(), 0.1)
    hook.watch(model, optimizer)
    for _ in range(15):
        tokens = torch.randint(4, 50, (16, 10))
        lengths = torch.randint(1, longest + 1, (16, 1))
        tokens[torch.arange(10) >= lengths] = 3
        optimizer.zero_grad()
        model(tokens).sum().backward()
        optimizer.step()


def test_sentences_that_are_mostly_padding_and_the_twin(tmp_path: Path) -> None:
    found = evaluate_training(lambda hook: trained(hook, 5), "token_ratio", tmp_path / "a")
    assert {finding.tensor for finding in found} == {"0:output"}
    assert found[0].step == 9
    assert "is padding or another watched token, more than 50%" in found[0].message
    assert evaluate_training(lambda hook: trained(hook, 12), "token_ratio", tmp_path / "b") == []


def found(watched: list[float], top: list[float], **params: object) -> list[int]:
    rows = [
        Row(step, WORDS, [0.0], probes={"token_share": watched_share, "top_token_share": top_share})
        for step, (watched_share, top_share) in enumerate(zip(watched, top, strict=True))
    ]
    return steps_of(
        all_at_once(RuleConfig(rule="token_ratio", params={"window": 2, **params}), in_steps(rows)),
        WORDS.name,
    )


def test_shares_are_averaged_over_the_window() -> None:
    assert found([0.9, 0.0, 0.9, 0.2, 0.2], [0.9] * 5) == [3]
    assert found([0.0] * 3, [0.9, 0.9, 0.1], top_share=0.8) == [1]
    assert found([0.0] * 3, [0.9] * 3) == []
