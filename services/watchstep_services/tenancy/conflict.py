"""What stands against a change that is valid by itself."""

from __future__ import annotations

from watchstep.errors import ConfigError


class ConflictError(ConfigError):
    """Something else is in the way: a name that is taken, a thing that is in use, a project that is archived."""
