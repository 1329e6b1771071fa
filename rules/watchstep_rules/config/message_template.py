"""Messages of a rule config's own: text with ``{field}`` in it, filled from a fixed list of words.

A field is looked up by its name and nothing else: there are no attributes, indices, conversions or formats, so a
template from a rule file cannot reach further than what is listed here. ``{{`` and ``}}`` stand for braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MOST_CHARACTERS = 1000
"""Of a template."""

MOST_FILLED = 4000
"""Of a message; what is longer is cut."""

LABEL = "label."
"""``{label.team}`` is the config's label ``team``."""

FIELDS: dict[str, str] = {
    "name": "the rule config's name",
    "rule": "the rule",
    "severity": "the rule config's severity",
    "project": "the run's project",
    "run": "the run's id",
    "attempt": "the attempt",
    "step": "the step that was judged",
    "mode": "its mode",
    "worker": "the rank",
    "tensor": "the tensor's name; 'the run' for a finding about the run as a whole",
    "module": "path of its module",
    "module_type": "the module's class",
    "role": "what the tensor is to its module",
    "value": "what was seen, in four digits",
    "threshold": "what it was held against, in four digits",
    "message": "the finding's own message",
    "since_step": "the first step of the findings that made the alert fire",
}
"""What may stand in a template, beside the labels."""

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def check(text: str, labels: Mapping[str, str] | None, fields: Mapping[str, str] = FIELDS) -> None:
    """See that every field of a template is known.

    Args:
        text: the template.
        labels: the only ones that may be named; None for any.
        fields: what else may.

    Raises:
        ValueError: one is not, or a brace stands alone.
    """
    for found in _PART.finditer(text):
        if found[0] in ("{{", "}}"):
            continue
        field = found[1]
        if field is None:
            raise ValueError(f"a brace stands alone at character {found.start() + 1}: write {found[0] * 2}")
        label = field.removeprefix(LABEL) if field.startswith(LABEL) else None
        if field in fields or (label and (labels is None or label in labels)):
            continue
        known = ", ".join([*fields, *(LABEL + name for name in (["NAME"] if labels is None else labels))])
        raise ValueError(f"unknown field {{{field}}}; use one of: {known}")


def fill(text: str, values: Mapping[str, str], most: int = MOST_FILLED) -> str:
    """A message from a template that was checked.

    Args:
        text: the template.
        values: what stands for each field, labels with their prefix; one that is missing is a dash.
        most: characters of the message; what is longer is cut.
    """

    def part(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][:1]
        return values.get(found[1], "-")

    return _PART.sub(part, text)[:most]
