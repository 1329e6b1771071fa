"""The share of padding, and of the most frequent token, in an embedding's input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.sdk.training import recorded
from watchstep import CaptureConfig, Hook
from watchstep.errors import ConfigError
from watchstep.pytorch.probes.activations import TokenProbe


def shares(tokens: torch.Tensor, module: nn.Module, *values: int) -> tuple[float, float]:
    found = TokenProbe(module, values, ("token_shares",)).measure(tokens)
    assert found is not None
    columns = found.collect()
    return columns["token_share"].item(), columns["top_token_share"].item()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_shares_are_counts_over_all(tokens: list[int]) -> None:
    most = max(tokens.count(token) for token in tokens) / len(tokens)
    tensor, module = torch.tensor(tokens), nn.Embedding(5, 2)
    assert shares(tensor, module) == pytest.approx((tokens.count(0) / len(tokens), most))
    padded = nn.Embedding(5, 2, padding_idx=3)
    assert shares(tensor, padded)[0] == pytest.approx(tokens.count(3) / len(tokens))
    assert shares(tensor, padded, 1, 2)[0] == pytest.approx((tokens.count(1) + tokens.count(2)) / len(tokens))


def test_long_inputs_are_sampled() -> None:
    tokens = torch.zeros(40_000, dtype=torch.int64)
    tokens[::2] = torch.randint(1, 1000, (20_000,), generator=torch.Generator().manual_seed(0))
    watched, top = shares(tokens.view(200, 200), nn.Embedding(1000, 2))
    assert watched == top == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("padding", [[0, 1], "pad", float("nan")])
def test_a_module_that_calls_something_else_its_padding_index_is_watched(padding: object) -> None:
    module = nn.Linear(2, 2)
    module.padding_idx = padding  # type: ignore[assignment]
    assert not TokenProbe(module, (), ("token_shares",)).applies


def test_other_modules_and_empty_inputs_have_none() -> None:
    assert not TokenProbe(nn.Linear(2, 2), (), ("token_shares",)).applies
    assert (
        TokenProbe(nn.Embedding(2, 2), (), ("token_shares",)).measure(torch.zeros(0, dtype=torch.int64))
        is None
    )


def test_they_are_recorded_with_the_embeddings_output(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 1))
    hook = Hook(tmp_path, config=CaptureConfig(overhead_budget=None, token_values=(7,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.watch(model, optimizer)
    model(torch.tensor([[7, 7, 7], [7, 1, 2]])).sum().backward()
    optimizer.step()
    rows = recorded(hook).tensor("0:output").statistics().to_pydict()
    assert rows["probe.token_share"] == rows["probe.top_token_share"] == [pytest.approx(4 / 6)]


def test_values_are_whole_numbers() -> None:
    with pytest.raises(ConfigError, match="token_values"):
        CaptureConfig(token_values=[0])  # type: ignore[arg-type]
