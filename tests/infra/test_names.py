"""A class name means one thing in the whole product, and retired words are gone from public names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "sdk/watchstep",
    "rules/watchstep_rules",
    "launch/watchstep_launch",
    "services/watchstep_services",
)
SAME_ON_PURPOSE = {"WatchstepCallback"}
"""Callbacks of frameworks, which are named as their frameworks' own are."""

RETIRED = {"let_go", "mend", "seal_seconds", "teller", "letter"}


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return [
        (str(path.relative_to(ROOT)), ast.parse(path.read_text()))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {
        name: found for name, found in places.items() if len(found) > 1 and name not in SAME_ON_PURPOSE
    } == {}


@pytest.mark.parametrize("word", sorted(RETIRED))
def test_retired_words_are_in_no_name(word: str) -> None:
    found = [
        f"{path}: {node.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and word in node.name.lower()
    ]
    assert found == []


EMBEDDED = re.compile(r"^\s*from (watchstep[\w.]*) import (\([^)]*\)|[^\n(#]+)", re.MULTILINE)


@cache
def defined(module: str) -> set[str] | None:
    """The names that a module binds, with its submodules; None where there is no such module, and everything where names are lazy."""
    for package in PACKAGES:
        top = Path(package)
        if module.split(".", maxsplit=1)[0] != top.name:
            continue
        path = ROOT / top.parent / module.replace(".", "/")
        source = path.with_suffix(".py")
        if not source.exists():
            source = path / "__init__.py"
        if not source.exists():
            return None
        names = {child.stem for child in path.iterdir()} if path.is_dir() else set()
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # names of a lazy package
        return names
    return None


def test_embedded_programs_import_what_exists() -> None:
    """Programs in strings, pages and notebooks are seen by no type checker."""
    missing = []
    for pattern in (
        "[!.]*/**/*.py",
        "*.md",
        "[!.]*/**/*.md",
        "[!.]*/**/*.ipynb",
        ".ci/*",
        "Makefile",
        "infra/**/*",
    ):
        for path in sorted(path for path in ROOT.glob(pattern) if path.is_file()):
            # Programs of infra/ that tests import leave bytecode beside them.
            if path.name == "CHANGELOG.md" or path == Path(__file__) or "__pycache__" in path.parts:
                continue
            text = path.read_text(encoding="utf-8").replace("\\n", "\n")
            for found in EMBEDDED.finditer(text):
                if found[1] == "watchstep_rules":
                    continue  # its names are those of the rules, made when they are asked for
                names = [part.split(" as ")[0].strip(" ()\"',\\") for part in found[2].split(",")]
                known = defined(found[1])
                missing += [
                    f"{path.relative_to(ROOT)}: from {found[1]} import {name}"
                    for name in names
                    if name.isidentifier() and (known is None or name not in known)
                ]
    assert not missing, "\n".join(missing)
