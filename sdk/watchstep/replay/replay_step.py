"""What a program states about its training step, so that it can be replayed, and loading it from the program's file."""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from watchstep.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_Step = TypeVar("_Step")

DEFAULT_NAME = "replay"
"""Name of the function of a program that returns its `ReplayStep`, unless another is given."""

_HINT = "give FILE.py:NAME or MODULE:NAME, where NAME is a function without arguments that returns a watchstep.ReplayStep, or a JaxStep of JAX"


@dataclass(frozen=True)
class ReplayStep:
    """A program's training step.

    Attributes:
        model: the model as the program builds it, with any weights: those of the bundle are loaded. It may be wrapped, as in
            `DistributedDataParallel`.
        loss: computes the loss of one micro-batch, as the program passes it to ``backward()`` without the scale of a gradient scaler:
            ``loss(model, batch)``. The batch is what the data loader yielded, or what the program gave to ``hook.batch``; if there is
            neither, the arguments of the model: one positional argument itself, several as a tuple, keywords as a mapping.
        before_update: changes the gradients before the update, such as clipping; called with the model. None: nothing.
        optimizer: returns the program's optimizer for the model; then the update is made as well, from the recorded state. None: the replay
            ends with the gradients.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    before_update: Callable[[Any], object] | None = None
    optimizer: Callable[[Any], Optimizer] | None = None


def _check_defined(path: Path, name: str) -> None:
    """Look for the function before the file is run: without it, the program may start to train.

    Raises:
        ConfigError: the file does not define the name, or is no Python file.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"program {str(path)!r}: {error}", _HINT) from error
    if not any(name in _names_of(statement) for statement in tree.body):
        raise ConfigError(
            f"program {path.name!r} has no function {name!r}",
            f"{_HINT}; the file is run, so its training belongs under 'if __name__ == \"__main__\":'",
        )


def _names_of(statement: ast.stmt) -> set[str]:
    """Return the names that a statement at the top of a file may define; for blocks, those of all statements in them."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return set()
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return names | {node.name for node in ast.walk(statement) if isinstance(node, ast.FunctionDef)}


def load_step(program: str) -> ReplayStep:
    """Return the step of a PyTorch program. See `load_program_step`.

    Raises:
        ConfigError: there is no such program or function, or it returns something else.
    """
    return load_program_step(program, ReplayStep)


def load_program_step(program: str, kind: type[_Step]) -> _Step:
    """Return the step of a program, by running the file or importing the module.

    The program runs with ``__name__ == "watchstep_replay"``, so that what is under ``if __name__ == "__main__"`` is not run. It is
    the user's own: nothing in a bundle is ever executed.

    Args:
        program: ``FILE.py``, ``FILE.py:NAME``, ``MODULE`` or ``MODULE:NAME``.
        kind: The class of the step that the function returns.

    Raises:
        ConfigError: there is no such program or function, or it returns something else.
    """
    place, _, name = program.rpartition(":") if ":" in program else (program, "", "")
    name = name or DEFAULT_NAME
    if place.endswith(".py"):
        path = Path(place).expanduser().absolute()
        if not path.is_file():
            raise ConfigError(f"program {place!r} does not exist", _HINT)
        _check_defined(path, name)
        sys.path.insert(0, str(path.parent))
        sys.argv = [str(path)]
        found = runpy.run_path(str(path), run_name="watchstep_replay").get(name)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = getattr(importlib.import_module(place), name, None)
        except ModuleNotFoundError as error:
            raise ConfigError(f"program {program!r}: {error}", _HINT) from error
    if not callable(found):
        raise ConfigError(f"program {place!r} has no function {name!r}", _HINT)
    step = found()
    if not isinstance(step, kind):
        raise ConfigError(
            f"{name}() of {place!r} returned a {type(step).__name__}, not a {kind.__name__}", _HINT
        )
    return step
