"""A small evaluator of IAM policies by AWS's documentation. It refuses elements that it does not support.

A session may do what the role's policies allow and the session's policy allows, unless one of them denies it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """One call of an API: the action, the ARN, and the keys that conditions look at."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def allowed(request: Request, role: str, session: str | None = None) -> bool:
    """Whether a session of a role may do something."""
    policies = [json.loads(text) for text in (role, session) if text is not None]
    effects = [
        [_effect(statement, request) for statement in _list(policy["Statement"])] for policy in policies
    ]
    if any("Deny" in effect for effect in effects):
        return False
    return all("Allow" in effect for effect in effects)


def _effect(statement: Mapping[str, Any], request: Request) -> str:
    unknown = set(statement) - {
        "Sid",
        "Effect",
        "Action",
        "NotAction",
        "Resource",
        "NotResource",
        "Condition",
    }
    assert not unknown, unknown
    matches = (
        _named(statement, "Action", request.action.lower(), str.lower)
        and _named(statement, "Resource", request.resource, str)
        and all(
            _condition(operator, key, _list(values), request.context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )
    return str(statement["Effect"]) if matches else ""


def _named(statement: Mapping[str, Any], name: str, value: str, spelled: Any) -> bool:
    if f"Not{name}" in statement:
        return not any(like(value, spelled(pattern)) for pattern in _list(statement[f"Not{name}"]))
    return any(like(value, spelled(pattern)) for pattern in _list(statement[name]))


def _condition(operator: str, key: str, values: Sequence[str], context: Mapping[str, str]) -> bool:
    actual = {name.lower(): value for name, value in context.items()}.get(key.lower())
    if operator == "Null":
        return any((actual is None) == (value == "true") for value in values)
    if operator.endswith("IfExists"):
        if actual is None:
            return True
        operator = operator.removesuffix("IfExists")
    if operator in {"StringNotEquals", "StringNotLike"}:
        return actual is None or not _condition(operator.replace("Not", ""), key, values, context)
    if actual is None:
        return False
    if operator in {"StringEquals", "ArnEquals"}:
        return actual in values
    if operator in {"StringLike", "ArnLike"}:
        return any(like(actual, value) for value in values)
    if operator == "Bool":
        return actual.lower() in {value.lower() for value in values}
    raise NotImplementedError(operator)


def like(value: str, pattern: str) -> bool:
    """``*`` is any run of characters, slashes as well; ``?`` is one; ``${…}`` is a variable, of which there are none here."""
    assert "${" not in pattern, pattern
    text = "".join({"*": ".*", "?": "."}.get(mark, re.escape(mark)) for mark in pattern)
    return re.fullmatch(text, value, re.DOTALL) is not None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
