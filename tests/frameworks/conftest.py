"""How JAX compiles in tests, and which tests of frameworks wait for a release: Keras on other backends than TensorFlow's, each of which trains all programs anew, and
default rules on PyTorch and TensorFlow, on which the rules' own tests and Keras judge."""

from __future__ import annotations

import os

import pytest

# Tests compile for longer than they compute. `make test-release` compiles as programs of users do.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

_OTHER_BACKENDS = {
    ("backend", "jax"),
    ("backend", "torch"),
    ("framework", "keras-jax"),
    ("framework", "keras-torch"),
    ("framework", "pytorch"),
    ("framework", "tensorflow"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and _OTHER_BACKENDS & {
            (name, value) for name, value in callspec.params.items() if isinstance(value, str)
        }:
            item.add_marker(pytest.mark.release)
