"""Parts that give the same for every example, and parts that starve beside a rival that has won."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.rules.runs import all_at_once, follow, in_steps, norms, one_by_one, steps_of
from tests.sdk.format.blocks import Row, tensor
from watchstep_rules.config.rule_config import RuleConfig

# representation_collapse


COLLAPSE = RuleConfig(rule="representation_collapse", params={"records": 3, "steps": 5})
FIRST = replace(tensor("encoder.0:output", "activations", shape=(16, 64)), order=1)
LAST = replace(tensor("encoder.2:output", "activations", shape=(16, 32)), order=2)
AFTER = replace(tensor("head:output", "activations", shape=(16, 8)), order=3)
NARROW = replace(LAST, shape=(16, 2))
MSE = replace(tensor("loss", "losses", shape=()), module_type="MseLoss")

Shares = Sequence[float]
COLLAPSES = [0.2, 0.1, *[5e-4] * 8]


def outputs(info: object, shares: Shares) -> list[Row]:
    return [Row(step, info, [1.0], probes={"example_spread": share}) for step, share in enumerate(shares)]  # type: ignore[arg-type]


def alive(share: float = 0.3) -> list[Row]:
    return outputs(FIRST, [share] * len(COLLAPSES))


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        ([alive(), outputs(LAST, COLLAPSES)], [7, 8, 9]),
        ([alive(), outputs(LAST, COLLAPSES), outputs(AFTER, [0.2] * 10)], [7, 8, 9]),
        ([alive(), outputs(LAST, [0.2, *[5e-4] * 5, 0.01, *[5e-4] * 3])], []),
        ([alive(), outputs(LAST, [*[5e-4] * 10])], []),
        ([alive(), outputs(LAST, [0.2, *[5e-3] * 9])], []),
        ([alive(5e-4), outputs(LAST, COLLAPSES)], []),
        ([outputs(LAST, COLLAPSES)], []),
        ([alive(), outputs(NARROW, COLLAPSES)], []),
        ([alive(), outputs(LAST, [0.2, 0.1, *[np.nan] * 8])], []),
        ([alive(), outputs(LAST, COLLAPSES), [Row(0, MSE, [1.0])]], []),
        ([alive(), outputs(LAST, COLLAPSES), outputs(AFTER, [0.2] * 10), [Row(0, MSE, [1.0])]], [7, 8, 9]),
    ],
    ids=[
        "collapse",
        "collapse before a layer that differs",
        "contracts and spreads",
        "never differed",
        "small but distinct",
        "equal inputs",
        "nothing before it",
        "two features",
        "not measured",
        "targets of a regression",
        "inside of a regression",
    ],
)
def test_outputs_that_become_equal(rows: list[list[Row]], steps: list[int]) -> None:
    block = in_steps(*rows)
    outcome = all_at_once(COLLAPSE, block)
    assert steps_of(outcome, "encoder.2:output") == steps
    assert follow(COLLAPSE, one_by_one(block)) == outcome


# vanishing_gradient, of a generator


STARVES = RuleConfig(rule="vanishing_gradient", params={"starved": 10})
STEPS = 60
WON = [1.4] * 5 + [1e-4] * (STEPS - 5)
LOST = [-0.6] * 5 + [-1e-4] * (STEPS - 5)
FALLEN = [1.0] * 5 + [1e-3] * (STEPS - 5)


def losses(name: str, values: Shares, *, every: int = 1) -> list[Row]:
    info = tensor(name, "losses", shape=())
    return [Row(step, info, [value]) for step, value in enumerate(values) if step % every == 0]


def starved(*rows: list[Row]) -> set[str]:
    block = in_steps(*rows)
    outcome = all_at_once(STARVES, block)
    assert follow(STARVES, one_by_one(block)) == outcome
    return {finding.tensor.partition(".")[0] for finding in outcome.findings}


def every_third(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.step % 3 == 0]


@pytest.mark.parametrize(
    ("won", "lost"), [("loss", "loss_2"), ("d_loss", "g_loss"), ("loss/critic", "loss/gen")]
)
def test_a_generator_starves_beside_a_discriminator_that_has_won(won: str, lost: str) -> None:
    rivals = losses(won, WON), losses(lost, LOST, every=3)
    discriminator, generator = norms("d", FALLEN), every_third(norms("g", FALLEN))
    assert starved(*rivals, discriminator, generator) == {"g"}
    assert starved(losses(won, WON), losses(lost, LOST), norms("d", FALLEN), norms("g", FALLEN)) == {"d", "g"}


@pytest.mark.parametrize(
    "rows",
    [
        (losses("loss", WON), losses("loss_2", LOST), norms("d", FALLEN), norms("g", [1.0] * STEPS)),
        (losses("loss", [1.4] * STEPS), losses("loss_2", LOST), norms("g", FALLEN)),
        (losses("loss", WON), losses("loss_2", [0.6] * 5 + [0.1] * (STEPS - 5)), norms("g", FALLEN)),
        (losses("loss", WON), losses("loss_2", [-0.6, 0.1] * (STEPS // 2)), norms("g", FALLEN)),
        (
            losses("loss", WON),
            losses("weight_norm_loss", [1.0] * 5 + [2.0] * (STEPS - 5)),
            norms("g", FALLEN),
        ),
        (losses("loss", WON), norms("g", FALLEN)),
    ],
    ids=["learns", "nobody has won", "learned", "a policy", "a penalty beside", "one loss"],
)
def test_parts_that_do_not_starve(rows: tuple[list[Row], ...]) -> None:
    assert starved(*rows) == set()
