from __future__ import annotations

import math

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep_rules.rule import Finding, cause_rank, finding_at, finding_of_run


def test_a_finding_states_the_place_of_its_row() -> None:
    block = block_of([Row(3, gradient("conv", order=4), [1.0], mode="eval", worker=2)])
    finding = finding_at("rule", block, 0, value=1.0, threshold=0.5, message="large")
    assert finding == Finding(
        rule="rule", step=3, mode="eval", worker=2, tensor="conv.weight:gradient", module="conv",
        module_type="Linear", role="gradient", value=1.0, threshold=0.5, message="large",
        time_ns=3_000_002, cause_rank=(3, -4),
    )  # fmt: skip


def test_causes_come_in_the_order_in_which_data_flows() -> None:
    flow = [
        tensor("first.weight", "weights", order=1),
        tensor("second.bias", "biases", order=2),
        tensor("first.output", "activations", order=1),
        tensor("second.output", "activations", order=2),
        tensor("loss", "losses"),
        gradient("second", order=2),
        gradient("first", order=1),
        tensor("accuracy", "metrics"),
    ]
    ranks = [cause_rank(info) for info in flow]
    assert ranks == sorted(ranks)


def test_values_that_are_not_finite_read_back() -> None:
    block = block_of([Row(0, gradient("a"), [1.0])])
    for value in (math.inf, -math.inf):
        finding = finding_at("rule", block, 0, value=value, threshold=0.0, message="")
        assert Finding.model_validate_json(finding.model_dump_json()) == finding


def test_a_finding_about_the_run_names_no_tensor() -> None:
    finding = finding_of_run("rule", 7, 9, value=1900.0, threshold=1800.0, message="nothing for 1900 s")
    assert (finding.tensor, finding.step, finding.time_ns, finding.mode) == ("", 7, 9, "global")
    block = block_of([Row(7, gradient("conv", order=4), [1.0])])
    assert finding.cause_rank > finding_at("rule", block, 0, value=0, threshold=0, message="").cause_rank
