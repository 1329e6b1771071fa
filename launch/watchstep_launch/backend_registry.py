"""Registry of backend kinds, and the file that stores backends."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from watchstep.errors import ConfigError
from watchstep_launch.backend import Backend, BackendModel

KINDS: dict[str, tuple[str, str]] = {
    "aws_batch": ("watchstep_launch.backends.aws.batch", "AwsBatch"),
    "command": ("watchstep_launch.backends.command.backend", "Command"),
    "kubernetes": ("watchstep_launch.backends.kubernetes.backend", "Kubernetes"),
    "local": ("watchstep_launch.backends.local.backend", "Local"),
    "ray": ("watchstep_launch.backends.ray.backend", "Ray"),
    "sagemaker": ("watchstep_launch.backends.aws.sagemaker", "SageMaker"),
    "slurm": ("watchstep_launch.backends.slurm.backend", "Slurm"),
}
"""Kind → module and class. The class is a `BackendModel` that implements `Backend`."""

IN_SERVICE = frozenset(KINDS) - {"command"}
"""Kinds that admins may register with a service. User-defined commands run on the launcher's side only: permission to
register a backend must not imply permission to run programs on the service's machine."""


def backend_class(kind: str) -> type[BackendModel]:
    """Return the class of a kind.

    Raises:
        ConfigError: the kind is unknown, or its requirements are not installed.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown backend kind {kind!r}", f"use one of: {', '.join(sorted(KINDS))}")
    module, name = KINDS[kind]
    try:
        loaded: type[BackendModel] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"backend kind {kind!r} is not installed ({error})", f"pip install 'watchstep[{kind}]'"
        ) from error
    return loaded


def checked_settings(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are stored: JSON-ready, without default values.

    Raises:
        ConfigError: the kind is unknown or not installed, or the settings are invalid.
    """
    return _opened(kind, settings).model_dump(mode="json", exclude_defaults=True)


def open_backend(kind: str, settings: Mapping[str, Any]) -> Backend:
    """Return the backend with these settings.

    Raises:
        ConfigError: the kind is unknown or not installed, or the settings are invalid.
    """
    opened: Any = _opened(kind, settings)
    backend: Backend = opened
    return backend


def _opened(kind: str, settings: Mapping[str, Any]) -> BackendModel:
    try:
        return backend_class(kind).model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "settings"
        raise ConfigError(
            f"{place}: {first['msg']}", f"see the settings of a backend of kind {kind}"
        ) from error


BACKENDS_FILE = "backends.json"


@dataclass(frozen=True)
class StoredBackend:
    """A backend's kind and settings."""

    kind: str
    settings: Mapping[str, Any]


def read(file: Path) -> dict[str, StoredBackend]:
    """Return backends by name; empty if the file does not exist.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return {
            str(name): StoredBackend(str(entry["kind"]), dict(entry["settings"]))
            for name, entry in entries.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: cannot be read ({error!r})", "remove it; the next launch of a job creates a new one"
        ) from error


def put(file: Path, kind: str, settings: Mapping[str, Any]) -> str:
    """Add a backend to the file. Returns the name under which its jobs are bound; different settings get different names.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    encoded = json.dumps(dict(settings), sort_keys=True)
    name = kind if not settings else f"{kind.replace('_', '-')}-{sha256(encoded.encode()).hexdigest()[:8]}"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (file.parent / f".{file.name}.lock").open("w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            backends = read(file)
            if name not in backends:
                backends[name] = StoredBackend(kind, dict(settings))
                partial = file.with_suffix(".partial")
                descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as writing:
                    json.dump({key: asdict(backend) for key, backend in backends.items()}, writing, indent=1)
                partial.replace(file)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror})", "check the permissions of its folder"
        ) from error
    return name
