"""docker-compose.yml as tests read it, so that they run the very commands that it runs."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"

_REFERENCE = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<name>[A-Z0-9_]+):-(?P<default>[^{}$]*)\})")


def interpolated(text: str) -> str:
    """A value with every variable at its default.

    Raises:
        ValueError: a reference that is not of the form ``${NAME:-default}``.
    """
    if "$" in _REFERENCE.sub("", text):
        raise ValueError(f"{text!r}: write ${{NAME:-default}}")
    return _REFERENCE.sub(lambda found: "$" if found["escaped"] else found["default"], text)


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_filled(child) for child in value]
    return interpolated(value) if isinstance(value, str) else value


@functools.lru_cache(maxsize=1)
def raw_services() -> dict[str, dict[str, Any]]:
    """The services as they are written, by name."""
    services: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))["services"]
    return services


def services() -> dict[str, dict[str, Any]]:
    """The services with every variable at its default, by name."""
    filled: dict[str, dict[str, Any]] = _filled(raw_services())
    return filled


def command_of(service: str) -> list[str]:
    """What a service runs."""
    command: list[str] = services()[service]["command"]
    return command


def health_of(service: str) -> list[str]:
    """The command whose exit code is the health of a service."""
    kind: str
    command: list[str]
    kind, *command = services()[service]["healthcheck"]["test"]
    return {"CMD": command, "CMD-SHELL": ["sh", "-c", *command]}[kind]


def search_path() -> str:
    """A PATH on which the image's commands are this installation's."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
