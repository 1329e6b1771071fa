"""Trainings without each name of Keras and TensorFlow that is private, or that another version may lack."""

from __future__ import annotations

from typing import Any

import pytest

from tests.missing_names import COMPLETE, WITHOUT_MODULE, WITHOUT_WATCHSTEP, results_of

pytest.importorskip("tensorflow")
pytest.importorskip("jax")

from tests.frameworks.tensorflow.program_without_names import ON_JAX
from watchstep.keras.internals import keras_names
from watchstep.tensorflow.internals import tensorflow_names

NAMES = {"Keras": keras_names, "TensorFlow": tensorflow_names}

pytestmark = pytest.mark.release  # each version of a framework is tested by `make matrix`, too


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return results_of("tests.frameworks.tensorflow.program_without_names")


@pytest.mark.parametrize("framework", ["Keras", "Keras on jax", "TensorFlow"])
def test_a_complete_framework_costs_nothing(framework: str, results: dict[str, Any]) -> None:
    complete = results[f"{framework}:{COMPLETE}"]
    assert "error" not in complete, complete["error"]
    assert complete["result"] == results[f"{framework}:{WITHOUT_WATCHSTEP}"]["result"]
    assert not complete["faults"]
    assert not [note for note in complete["notes"] if ": " in note]
    assert "loss" in complete["tensors"]


@pytest.mark.parametrize("framework", NAMES)
def test_a_module_that_cannot_be_imported_ends_no_training(framework: str, results: dict[str, Any]) -> None:
    result = results[f"{framework}:{WITHOUT_MODULE}"]
    assert "error" not in result, result["error"]
    assert result["result"] == results[f"{framework}:{WITHOUT_WATCHSTEP}"]["result"]
    assert list(result["faults"]) == [f"{framework} is not recorded"]


@pytest.mark.parametrize(
    ("framework", "key"), [(framework, key) for framework, names in NAMES.items() for key in names.table]
)
def test_a_missing_name_costs_one_capability(framework: str, key: str, results: dict[str, Any]) -> None:
    result, cost = results[f"{framework}:{key}"], NAMES[framework].table[key].cost
    plain = f"{framework} on jax" if key in ON_JAX else framework
    assert "error" not in result, result["error"]
    assert result["result"] == results[f"{plain}:{WITHOUT_WATCHSTEP}"]["result"]
    assert not result["faults"]
    assert f"{framework}: {cost}" in result["notes"]
    is_all = cost in {"updates", "gradients of tapes", "updates of compiled steps on JAX"}
    # Updates under dynamic loss scaling are observed by a name of their own.
    without_scaling = [name for name in result["tensors"] if not name.startswith("scaled.")]
    assert any(name.endswith(":gradient") for name in without_scaling) != is_all
