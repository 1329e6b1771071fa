from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.rules.runs import Event, Rows, runs
from tests.sdk.format.blocks import rows_of
from watchstep.format.block import Block, concatenate
from watchstep_rules.config.rule_config import RuleConfig, TensorScope
from watchstep_rules.engine.rule_inputs import JudgingProgress, RuleInputs
from watchstep_rules.signals.series import merge_shards

GRADIENTS = RuleConfig(rule="exploding_gradient", params={"window": 2})
LOSSES = RuleConfig(rule="loss_spike", params={"window": 5}, tensors=TensorScope(exclude="val"))
NAN = RuleConfig(rule="non_finite_values")


def in_scope(config: RuleConfig, block: Block) -> Block:
    needs = config.implementation.needed(config.parameters)
    return block.where(
        block.mask_of_tensors([config.tensors.selects(info, needs) for info in block.catalogue])
    )


def of_roles(block: Block, roles: tuple[str, ...], others: bool) -> Block:
    """Rows of tensors with some roles, all where there are none; or the others."""
    return block.where(
        block.mask_of_tensors([(not roles or info.role in roles) != others for info in block.catalogue])
    )


@given(runs(), st.integers(-1, 24), st.integers(0, 8))
def test_rows_that_rules_share_are_those_that_each_would_take_alone(
    events: list[Event], before: int, further: int
) -> None:
    parts = [event.block for event in events if isinstance(event, Rows)]
    half = len(parts) // 2
    history, arrived = concatenate(parts[:half]), concatenate(parts[half:])
    shared = RuleInputs(history, arrived, JudgingProgress(before, before + further, 0))
    for config in (GRADIENTS, LOSSES, GRADIENTS):
        pool = in_scope(config, concatenate([history, arrived]))
        due = (pool.step > before) & (pool.step <= before + further)
        reach = config.implementation.lookback(config.parameters)
        assert rows_of(shared.block(config)) == rows_of(merge_shards(pool.where(due)))
        context, earlier = shared.context(config), merge_shards(pool.where(pool.step <= before))
        roles = ("gradient",) if config is GRADIENTS else ()
        for evidence in (False, True):
            depth = 1 if config is GRADIENTS and evidence else reach
            assert rows_of(of_roles(context, roles, evidence)) == rows_of(
                of_roles(earlier, roles, evidence).tail(depth)
            )
    assert rows_of(shared.block(NAN)) == rows_of(in_scope(NAN, arrived))
    assert len(shared.context(NAN)) == 0
