"""Trainings without each name of JAX that is private, or that another version may lack."""

from __future__ import annotations

from typing import Any

import pytest

from tests.missing_names import COMPLETE, WITHOUT_MODULE, WITHOUT_WATCHSTEP, results_of

pytest.importorskip("jax")
from watchstep.jax.internals import jax_names

pytestmark = pytest.mark.release  # each version of a framework is tested by `make matrix`, too


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return results_of("tests.frameworks.jax.program_without_names")


def test_a_complete_jax_costs_nothing(results: dict[str, Any]) -> None:
    complete = results[COMPLETE]
    assert complete["result"] == results[WITHOUT_WATCHSTEP]["result"]
    assert not complete["faults"]
    assert not [note for note in complete["notes"] if note.startswith("JAX: ")]
    assert {"kernel:gradient", "loss", "first:output", "dense:output"} <= set(complete["tensors"])


def test_a_module_that_cannot_be_imported_ends_no_training(results: dict[str, Any]) -> None:
    result = results[WITHOUT_MODULE]
    assert result["result"] == results[WITHOUT_WATCHSTEP]["result"]
    assert list(result["faults"]) == ["JAX is not recorded"]


@pytest.mark.parametrize("key", jax_names.table)
def test_a_missing_name_costs_one_capability(key: str, results: dict[str, Any]) -> None:
    result, cost = results[key], jax_names.table[key].cost
    assert "error" not in result, result["error"]
    for part, losses in result["result"].items():
        assert losses == results[WITHOUT_WATCHSTEP]["result"].get(part, []), part
    assert not result["faults"]
    assert f"JAX: {cost}" in result["notes"]
    assert ("loss" in result["tensors"]) == (cost != "updates")
