"""Where in a YAML document something stands, so that an error can name its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from watchstep_rules.yaml_reading import nodes_of

Loc = tuple[str | int, ...]
"""A path into data: keys of mappings and places in lists."""


@dataclass(frozen=True)
class Places:
    """The nodes of a document; None for an empty one."""

    root: yaml.Node | None

    @classmethod
    def of(cls, text: str) -> Places:
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
