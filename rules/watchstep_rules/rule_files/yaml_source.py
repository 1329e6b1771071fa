"""YAML from untrusted sources as plain data: errors name their line, and aliases cannot make a short text large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

Loc = tuple[str | int, ...]
"""A path in data: keys of mappings and indices of lists."""


@dataclass(frozen=True)
class YamlNodes:
    """The nodes of a document; ``root`` is None for an empty document."""

    root: yaml.Node | None

    @classmethod
    def of(cls, text: str) -> YamlNodes:
        """The nodes of a text.

        Raises:
            yaml.YAMLError, RecursionError: as for `nodes_of`.
        """
        return cls(nodes_of(text))

    def line(self, loc: Sequence[str | int]) -> int:
        """The line, from 1, of the value at a path, or of its last existing parent."""
        node, line = self.root, 1 if self.root is None else self.root.start_mark.line + 1
        for part in loc:
            if isinstance(node, yaml.MappingNode):
                entries = [(key, value) for key, value in node.value if key.value == str(part)]
                if entries:
                    key, node = entries[-1]
                    line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
        return line

    def duplicates(self) -> list[tuple[str, int]]:
        """Duplicate keys of mappings, of which YAML uses the last, with the line of the second."""
        duplicates, seen = [], set()
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
                    duplicates.append((key.value, key.start_mark.line + 1))
                keys.add(str(key.value))
                waiting.append(value)
        return sorted(duplicates, key=lambda place: place[1])


MOST_FROM_ALIASES = 20_000
"""Limit of nodes that aliases add when they are expanded."""

_LONGEST_NUMBER = 1000
"""Limit of characters in a number, because parsing time grows with their square."""

_MUCH = 1 << 40
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
_FAULTS = (ValueError, KeyError, IndexError, AttributeError, TypeError, ArithmeticError)
"""Exceptions of PyYAML's constructors for text that does not match its tag."""


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
            problem = f"{shown} is not a valid {name}; put it in quotes if it is a string"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def nodes_of(text: str) -> yaml.Node | None:
    """The root node of a document; None if it is empty.

    Raises:
        yaml.YAMLError: the text is not valid YAML, or its aliases expand to more than `MOST_FROM_ALIASES` nodes or contain themselves.
        RecursionError: the document is nested too deeply.
    """
    root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    if root is not None:
        _check_aliases(root)
    return root


def data_of(text: str) -> Any:
    """The data of a document.

    Raises:
        yaml.YAMLError: as for `nodes_of`, or a value does not match its tag.
        RecursionError: the document is nested too deeply.
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
    """Check the size with expanded aliases. Each node is visited once, after its children."""
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
                    _refuse("an alias contains itself", part)
            waiting += inside
    if sizes[id(root)] > len(sizes) + MOST_FROM_ALIASES:
        _refuse(f"aliases expand to more than {MOST_FROM_ALIASES} values: use fewer aliases", root)


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return []


def _refuse(problem: str, node: yaml.Node) -> None:
    raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
