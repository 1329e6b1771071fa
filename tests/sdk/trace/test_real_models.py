"""Healthy models as people train them: masks, buckets of relative positions, bfloat16 and fused attention raise no alarm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from watchstep.trace import Tracer, diagnose

pytestmark = pytest.mark.release

SMALL = {
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
}
IDS = torch.randint(0, 100, (4, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, 12, dtype=torch.long)
MASK[1, 6:] = 0
MASK[2, 1:] = 0


def model_of(name: str, attention: str) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and its inputs."""
    transformers = pytest.importorskip("transformers")
    inputs: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    if name == "bert":
        inputs["labels"] = torch.tensor([0, 1, 0, 1])
        config = transformers.BertConfig(**SMALL, attn_implementation=attention)
        return transformers.BertForSequenceClassification(config), inputs
    if name == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SMALL, attn_implementation=attention)
        ), inputs
    config = transformers.T5Config(
        d_model=32,
        d_kv=16,
        num_layers=2,
        num_heads=2,
        d_ff=64,
        vocab_size=100,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), inputs


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "attention"), [("bert", "eager"), ("bert", "sdpa"), ("llama", "sdpa"), ("t5", "eager")]
)
def test_a_healthy_model_raises_no_alarm(name: str, attention: str, half: bool) -> None:
    torch.manual_seed(0)
    model, inputs = model_of(name, attention)
    optimizer = torch.optim.AdamW(model.parameters())
    tracer = Tracer(model)
    for _ in range(2):
        with tracer.step():
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = tracer.trace()
    assert len(trace.steps) == 2
    assert trace.notes == ()
    diagnosis = diagnose(trace)
    assert diagnosis.first is None
    # T5 takes the logarithm of distance zero, and ignores the result.
    assert {each.name for each in diagnosis.contained} <= ({"aten.log.default"} if name == "t5" else set())
