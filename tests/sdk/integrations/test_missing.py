"""The error for a missing library names the extra that installs it."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("transformers", "transformers"),
        ("lightning", "lightning"),
        ("accelerate", "accelerate"),
        ("optuna", "optuna"),
        ("ray_tune", "ray"),
    ],
)
def test_what_is_missing_names_its_extra(module: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"watchstep.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"watchstep\[{library}\]"):
        importlib.import_module(f"watchstep.integrations.{module}")
