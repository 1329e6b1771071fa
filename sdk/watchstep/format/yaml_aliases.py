"""Bounds YAML documents from untrusted sources: aliases and merge keys must not make a short text large. Needs PyYAML."""

from __future__ import annotations

import yaml

MOST_FROM_ALIASES = 20_000
"""Limit of nodes that aliases add when they are expanded."""

_MUCH = 1 << 40


def check_aliases(root: yaml.Node) -> None:
    """Check the size of a document with expanded aliases. Each node is visited once, after its children.

    Args:
        root: node from `yaml.compose`.

    Raises:
        yaml.YAMLError: aliases expand to more than `MOST_FROM_ALIASES` nodes, or contain themselves.
    """
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
