"""Names of frameworks that are private are looked up in one place per framework."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import watchstep

SDK = Path(watchstep.__file__).parent
GUARDED = {
    "jax": "jax/internals.py",
    "keras": "keras/internals.py",
    "tensorflow": "tensorflow/internals.py",
    "xgboost": "xgboost/internals.py",
    "lightgbm": "lightgbm/internals.py",
    "boosting": "",
    "updates": "",
    "integrations": "",
}
"""The module of each folder that looks up private names; empty for folders that have none."""

_PRIVATE_MODULES = re.compile(
    r"\b(jax\._src|jaxlib|keras\.src|tensorflow\.python|tensorflow\._api|torch\._\w+|xgboost\._\w+|lightgbm\._\w+|optax\._src)\b"
)
_OF_PYTHON = frozenset({"_replace", "_asdict", "_fields", "_make", "_getframe"})
_LOOKUPS = frozenset({"getattr", "hasattr", "setattr", "delattr"})


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_watchstep_")) and name not in _OF_PYTHON


@cache
def _own_names() -> frozenset[str]:
    """Names with an underscore that the SDK itself defines."""
    names: set[str] = set()
    for path in SDK.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
                names.add(node.target.id if isinstance(node.target, ast.Name) else node.target.attr)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            names.add(part.id)
                        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                            names.update({part.attr} if part.value.id == "self" else ())
    return frozenset(names)


def _private_uses(source: str, own: frozenset[str]) -> Iterator[str]:
    """Yield the private names of others that a module uses: imports, attributes, and names in strings."""
    tree = ast.parse(source)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("watchstep"):
            imported = f"{node.module}.{'.'.join(alias.name for alias in node.names)}"
            if any(_is_private(part) for part in imported.split(".")) or _PRIVATE_MODULES.search(imported):
                yield f"{node.lineno}: {imported}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            yield f"{node.lineno}: {node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if _PRIVATE_MODULES.search(node.value):
                yield f"{node.lineno}: {node.value}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LOOKUPS:
            name = node.args[1] if len(node.args) > 1 else None
            text = name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
            if _is_private(text) and text not in own:
                yield f"{node.lineno}: {text}"


def test_the_scan_finds_private_names() -> None:
    source = "from jax._src import core\nmodule = 'keras.src.backend'\nlayer._variables_\ngetattr(layer, '_kept')\n"
    assert len(list(_private_uses(source, frozenset()))) == 4


@pytest.mark.parametrize("folder", GUARDED)
def test_private_names_of_frameworks_are_looked_up_in_one_module(folder: str) -> None:
    own = _own_names()
    uses = {
        path.relative_to(SDK).as_posix(): list(_private_uses(path.read_text(), own))
        for path in sorted((SDK / folder).rglob("*.py"))
    }
    uses.pop(GUARDED[folder], None)
    assert not {path: found for path, found in uses.items() if found}
