"""YAML from untrusted sources as plain data: errors name their line, and aliases cannot make a short text large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

Loc = tuple[str | int, ...]
"""A path into data: keys of mappings and places in lists."""


@dataclass(frozen=True)
class YamlNodes:
    """The nodes of a document; None for an empty one."""

    root: yaml.Node | None

    @classmethod
    def of(cls, text: str) -> YamlNodes:
        """The places of a document.

        Raises:
            yaml.YAMLError, RecursionError: as of `nodes_of`.
        """
        return cls(nodes_of(text))

    def line(self, loc: Sequence[str | int]) -> int:
        """The line, from 1 on, of what a path leads to, or of the last of it that is there."""
        node, line = self.root, 1 if self.root is None else self.root.start_mark.line + 1
        for part in loc:
            if isinstance(node, yaml.MappingNode):
                found = [(key, value) for key, value in node.value if key.value == str(part)]
                if found:
                    key, node = found[-1]
                    line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
        return line

    def twice(self) -> list[tuple[str, int]]:
        """Keys that a mapping has twice, of which YAML takes the last, and the line of the second."""
        found, seen = [], set()
        waiting = [self.root] if self.root is not None else []
        while waiting:
            node = waiting.pop()
            if id(node) in seen or not isinstance(node, yaml.CollectionNode):
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                waiting += node.value
                continue
            keys: set[str] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    found.append((key.value, key.start_mark.line + 1))
                keys.add(str(key.value))
                waiting.append(value)
        return sorted(found, key=lambda place: place[1])


MOST_FROM_ALIASES = 20_000
"""Nodes that aliases may stand for together, beside those that are written out."""

_LONGEST_NUMBER = 1000
"""Characters of a number; reading one takes time that grows with their square."""

_MUCH = 1 << 40
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
_FAULTS = (ValueError, KeyError, IndexError, AttributeError, TypeError, ArithmeticError)
"""What PyYAML's constructors raise for text that is not what its tag says."""


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        name = node.tag.rpartition(":")[2]
        if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            problem = f"a number of {len(node.value)} characters, over the limit of {_LONGEST_NUMBER}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except _FAULTS as error:
            shown = f"{node.value[:100]!r}" if isinstance(node, yaml.ScalarNode) else "this"
            problem = f"{shown} is no {name}; put it in quotes where a text is meant"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def nodes_of(text: str) -> yaml.Node | None:
    """The nodes of a document; None for an empty one.

    Raises:
        yaml.YAMLError: it is no YAML, or its aliases stand for more than `MOST_FROM_ALIASES` nodes or for themselves.
        RecursionError: it is nested too deeply.
    """
    root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    if root is not None:
        _check_aliases(root)
    return root


def data_of(text: str) -> Any:
    """A document's data.

    Raises:
        yaml.YAMLError: as of `nodes_of`, or a value is not what its tag says.
        RecursionError: it is nested too deeply.
    """
    root = nodes_of(text)
    if root is None:
        return None
    loader = _Loader("")
    try:
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check_aliases(root: yaml.Node) -> None:
    """See that written out it would not be much longer. Each node is looked at once, those inside of it before it."""
    sizes: dict[int, int] = {}
    opened: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting[-1]
        place, inside = id(node), _inside(node)
        if place in sizes:
            waiting.pop()
        elif place in opened:
            sizes[place] = min(_MUCH, 1 + sum(sizes[id(part)] for part in inside))
            waiting.pop()
        else:
            opened.add(place)
            for part in inside:
                if id(part) in opened and id(part) not in sizes:
                    _refuse("an alias stands inside of what it stands for", part)
            waiting += inside
    if sizes[id(root)] > len(sizes) + MOST_FROM_ALIASES:
        _refuse(f"aliases that stand for more than {MOST_FROM_ALIASES} values: write less with them", root)


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return []


def _refuse(problem: str, node: yaml.Node) -> None:
    raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
