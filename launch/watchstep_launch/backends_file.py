"""The backends that the owner of an embedded service launches on: a file in the service's home, theirs alone to write."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from watchstep.errors import ConfigError

BACKENDS_FILE = "backends.json"


@dataclass(frozen=True)
class StoredBackend:
    """A backend as its settings."""

    kind: str
    settings: Mapping[str, Any]


def read(file: Path) -> dict[str, StoredBackend]:
    """Backends by name; none where there is no file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        return {
            str(name): StoredBackend(str(one["kind"]), dict(one["settings"])) for name, one in held.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: cannot be read ({error!r})", "remove it; launching a job writes it anew"
        ) from error


def put(file: Path, kind: str, settings: Mapping[str, Any]) -> str:
    """Have a backend in the file; returns the name by which jobs on it are bound: two with other settings have two.

    Raises:
        ConfigError: the file cannot be used.
    """
    given = json.dumps(dict(settings), sort_keys=True)
    name = kind if not settings else f"{kind.replace('_', '-')}-{sha256(given.encode()).hexdigest()[:8]}"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (file.parent / f".{file.name}.lock").open("w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = read(file)
            if name not in held:
                held[name] = StoredBackend(kind, dict(settings))
                partial = file.with_suffix(".partial")
                descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as writing:
                    json.dump({each: asdict(one) for each, one in held.items()}, writing, indent=1)
                partial.replace(file)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror})", "see to the permissions of its folder"
        ) from error
    return name
