"""What the marks of a run's page say about the tensors of an alert, whatever its stored event contains."""

from __future__ import annotations

from typing import Any

import pytest

from watchstep_services.api.queries.run_events import RunEvent, mark_of


def marked(data: dict[str, Any]) -> tuple[str, list[str], str]:
    mark = mark_of(RunEvent(1, "e", "alert.firing", 0, data), {}, "a1")
    return mark.tensor, mark.causes, mark.inhibited_by


def test_the_origin_comes_before_other_causes() -> None:
    finding = {
        "tensor": "fc.bias:gradient",
        "origin": "relu:output",
        "upstream": ["model:input", "relu:output"],
    }
    assert marked({"finding": finding, "inhibited_by": "nan_or_inf"}) == (
        "fc.bias:gradient",
        ["relu:output", "model:input"],
        "nan_or_inf",
    )


def test_a_tensor_is_not_its_own_cause() -> None:
    finding = {"tensor": "relu:output", "origin": "relu:output", "upstream": []}
    assert marked({"finding": finding}) == ("relu:output", [], "")


@pytest.mark.parametrize("finding", [None, [], "x", {"tensor": 3, "origin": None, "upstream": [1, {}, ""]}])
def test_findings_of_other_shapes_have_no_tensors(finding: Any) -> None:
    assert marked({"finding": finding}) == ("", [], "")


def test_long_names_and_many_causes_are_limited() -> None:
    tensor, causes, _ = marked({"finding": {"tensor": "t" * 9000, "upstream": [f"{n}" for n in range(99)]}})
    assert (len(tensor), len(causes)) == (4096, 8)
