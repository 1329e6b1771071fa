"""Where the source of a Python rule comes from: the file beside the rule file, put into the config as data.

A config that is data can be kept in a database and judged on another machine. So the file is read once, when the rule
file is loaded from its folder; and where rules come from someone who may not bring programs, they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from watchstep_rules.custom.python.rule import MAX_SOURCE, Python

NOT_FROM_RECORDERS = "a recorder may not bring one; give its rule file to the service"
"""Who records must not be able to run programs where runs are judged."""

_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)
_refusal: ContextVar[str] = ContextVar("_refusal", default="")


@contextmanager
def sources_from(folder: str | Path) -> Iterator[None]:
    """In the ``with`` block, a config's ``file`` is one below or beside this folder, and is read."""
    token = _folder.set(Path(folder))
    try:
        yield
    finally:
        _folder.reset(token)


@contextmanager
def no_programs(reason: str) -> Iterator[None]:
    """In the ``with`` block, no config may be a Python rule, for the reason given; empty for none."""
    token = _refusal.set(reason)
    try:
        yield
    finally:
        _refusal.reset(token)


def with_source(rule: str, params: dict[str, Any]) -> dict[str, Any]:
    """A rule's parameters, with the source of the file where it is a Python rule that names one.

    Raises:
        ValueError: it is a Python rule, and may not be one here; or its file cannot be read.
    """
    if rule != Python.name:
        return params
    if _refusal.get():
        raise ValueError(f"a Python rule: {_refusal.get()}")
    folder, file = _folder.get(), params.get("file")
    if folder is None or "source" in params or not isinstance(file, str) or not file:
        return params
    return {**params, "source": _read(folder / Path(file).expanduser())}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            data = opened.read(4 * MAX_SOURCE + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {path}: cannot be read ({error})") from error
    if len(text) > MAX_SOURCE:
        raise ValueError(f"file {path}: over {MAX_SOURCE} characters")
    return text
