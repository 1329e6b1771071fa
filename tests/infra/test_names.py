"""A class name means one thing in the whole product, and retired words are gone from public names."""

from __future__ import annotations

import ast
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
