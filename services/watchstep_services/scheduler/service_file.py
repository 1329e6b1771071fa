"""The note by which commands of this machine find the service that runs for a store."""

from __future__ import annotations

import json
from pathlib import Path

from watchstep.errors import ConfigError

SERVICE_FILE = "service.json"


def read_service_file(home: Path) -> dict[str, str] | None:
    """Address, token and store of the service that runs in a home; None where none does."""
    try:
        held = json.loads((home.expanduser() / SERVICE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{home / SERVICE_FILE}: cannot be read ({error})", "remove the file and start the service anew"
        ) from error
    return {str(key): str(value) for key, value in held.items()}
