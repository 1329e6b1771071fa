"""Profiles: named services with a project and a token, in ``~/.config/watchstep/profiles.yaml``.

.. code-block:: yaml

    default: lab                                      # used without --profile and WATCHSTEP_PROFILE
    profiles:
      lab:
        url: https://watchstep.lab.example
        project: vision
        token_file: lab.token                         # or token: wst_…

An option on the command line takes precedence over an environment variable, which takes precedence over the profile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from watchstep.errors import ConfigError
from watchstep.store.local import read_owned_file
from watchstep_services.core.redaction import keep_secret

PROFILE = "WATCHSTEP_PROFILE"
PROFILES = "WATCHSTEP_PROFILES"
_ROOT = 0
_MAX_BYTES = 1_048_576
_WRITABLE_BY_OTHERS = 0o022
_OPEN_TO_OTHERS = 0o077
_FIELDS = ("url", "project", "token", "token_file")


@dataclass(frozen=True)
class Profile:
    """A named service with defaults for commands.

    Attributes:
        name: name of the profile in the file.
        url: URL of the service.
        project: default project of commands; empty: ``default``.
        token: token for the service; empty: none.
    """

    name: str
    url: str
    project: str = ""
    token: str = ""


_chosen: list[str] = []
"""The profile of ``--profile``, which is read when a command first uses a service."""


def choose_profile(name: str) -> None:
    """Set the profile of the current command; empty: that of the environment, else the default of the file."""
    _chosen[:] = [name] if name else []


def profiles_file() -> Path:
    """Return the profiles file: WATCHSTEP_PROFILES, or ``watchstep/profiles.yaml`` in the user's configuration folder."""
    if file := os.environ.get(PROFILES):
        return Path(file).expanduser()
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "watchstep" / "profiles.yaml"


def active_profile() -> Profile | None:
    """Return the profile of ``--profile``, else of WATCHSTEP_PROFILE, else the default of the file; None without any.

    Raises:
        ConfigError: the file or the token file cannot be used, other users can read the token, or no profile has that name.
    """
    name = _chosen[0] if _chosen else os.environ.get(PROFILE, "")
    file = profiles_file()
    data = _read(file, required=bool(name))
    name = name or _text(data, "default", str(file))
    if not name:
        return None
    profiles = data.get("profiles")
    fields = profiles.get(name) if isinstance(profiles, dict) else None
    if not isinstance(fields, dict):
        names = ", ".join(sorted(map(str, profiles))) if isinstance(profiles, dict) else ""
        raise ConfigError(
            f"{file}: no profile {name!r}",
            f"use one of {names}" if names else f"add {name} with its url below 'profiles:'",
        )
    return _profile(file, name, fields)


def _read(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        text = read_owned_file(
            file, {os.geteuid(), _ROOT}, refused_modes=_WRITABLE_BY_OTHERS, max_bytes=_MAX_BYTES
        )
        data = yaml.safe_load(text.decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise ConfigError(f"{file}: no such file", "create it, or omit the profile") from None
        return {}
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be used ({error.strerror})", f"restrict it to your user: chmod 600 {file}"
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file}: not valid YAML ({' '.join(str(error).split())})", "correct the file"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: not a mapping", "write 'profiles:' with a mapping of profiles below it")
    return data


def _profile(file: Path, name: str, fields: Mapping[str, Any]) -> Profile:
    location = f"{file}: profile {name!r}"
    if unknown := sorted(map(str, set(fields) - set(_FIELDS))):
        raise ConfigError(f"{location}: unknown key {unknown[0]!r}", f"use {', '.join(_FIELDS)}")
    url, project, token, token_file = (_text(fields, field, location) for field in _FIELDS)
    if not url:
        raise ConfigError(f"{location}: no url", "add the URL of the service")
    if token and token_file:
        raise ConfigError(f"{location}: both token and token_file", "keep one of them")
    if token:
        _require_private(file)
    if token_file:
        path = Path(token_file).expanduser()
        path = path if path.is_absolute() else file.parent / path
        token = _token_of(path)
    if token:
        keep_secret(token)
    return Profile(name, url.rstrip("/"), project, token)


def _token_of(path: Path) -> str:
    try:
        data = read_owned_file(path, {os.geteuid(), _ROOT}, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise ConfigError(
            f"token file {path}: cannot be read ({error.strerror})",
            "correct token_file, or write the token to that file",
        ) from error
    _require_private(path)
    return data.decode("utf-8", "replace").strip()


def _require_private(path: Path) -> None:
    """Check that other users cannot read a file with a token."""
    mode = path.stat().st_mode & 0o777
    if mode & _OPEN_TO_OTHERS:
        raise ConfigError(
            f"{path}: contains a token, and other users may read it (mode {mode:04o})", f"chmod 600 {path}"
        )


def _text(fields: Mapping[str, Any], name: str, location: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{location}: {name} is not a string", f"write {name}: followed by a string")
    return value
