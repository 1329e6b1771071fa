"""Forms that AWS gives to requests and answers, whatever the service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_empty(value: Any) -> Any:
    """A request without what is not set: None, False, and lists and objects of nothing."""
    if not isinstance(value, dict):
        return value
    kept = {name: without_empty(held) for name, held in value.items()}
    return {name: held for name, held in kept.items() if not _is_nothing(held)}


def merged(value: Any, more: Any) -> Any:
    """A request with what else is to be in it: objects become one, anything else takes the place of what was there."""
    if not (isinstance(value, Mapping) and isinstance(more, Mapping)):
        return more
    return {**value, **{name: merged(value.get(name), held) for name, held in more.items()}}


def of_container(code: int) -> int:
    """An exit code with signals as negative numbers: a container that ends by one has 128 and its number."""
    return 128 - code if 128 < code < 160 else code


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [])
