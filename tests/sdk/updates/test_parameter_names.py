"""Names of parameters, from the paths of frameworks."""

from __future__ import annotations

import pytest

from watchstep.updates.parameter_names import kind_of, parameter_words, role_of


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ((), "parameters"),
        (("Dense_0",), "Dense"),
        (("layers", "3"), "layers"),
        (("encoder", "block_12", "LayerNorm_1"), "LayerNorm"),
        (("0", "1"), "parameters"),
        (("__",), "parameters"),
    ],
)
def test_the_kind_of_a_module_is_its_name_without_its_number(module: tuple[str, ...], kind: str) -> None:
    assert kind_of(module) == kind


def test_names_without_the_model_and_distinct() -> None:
    assert parameter_words(["model/dense/kernel", "model/dense/bias", "model/dense/kernel"]) == [
        ("dense", "kernel"),
        ("dense", "bias"),
        ("dense", "kernel_2"),
    ]
    assert parameter_words([""]) == [("variable",)]
    assert [role_of([name]) for name in ("kernel", "beta", "out_bias")] == ["weight", "bias", "bias"]
