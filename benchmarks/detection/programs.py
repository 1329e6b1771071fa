"""Programs to detect faults in: a file that exports ``CASES``, each with a training and what is wrong with it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Built = tuple[Any, Any, Any, Iterable[Any]]
"""Model, optimizer, loss function (of the model's output and the labels), batches of inputs and labels."""


@dataclass(frozen=True)
class Program:
    """One training.

    Attributes:
        id: its name.
        build: seed → model, optimizer, loss function, batches.
        steps: how many batches there are.
        kind: ``faulty``, or else healthy.
        truth: symptoms that must be reported.
        also: symptoms that are neither rewarded nor punished.
        onset: the first step at which the fault can be seen.
    """

    id: str
    build: Callable[[int], Built]
    steps: int
    kind: str
    truth: frozenset[str]
    also: frozenset[str]
    onset: int


def load(path: Path) -> dict[str, Program]:
    """The programs of a file.

    Raises:
        FileNotFoundError, AttributeError: there is no such file, or no ``CASES`` in it.
    """
    spec = importlib.util.spec_from_file_location(f"programs_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {
        name: Program(
            name,
            case.build,
            case.steps,
            case.kind,
            frozenset(case.truth),
            frozenset(getattr(case, "also", ())),
            getattr(case, "onset", 0),
        )
        for name, case in module.CASES.items()
    }
