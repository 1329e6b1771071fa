"""Settings of the service that runs for a store on this machine: of itself, and of those who look for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from watchstep.store.store import checked_scheme
from watchstep_services.settings import Settings, load_settings


def settings_for(store: str, home: Path | None, **values: Any) -> Settings:
    """Settings of an embedded service for a store.

    Its home is the one that is named here or by WATCHSTEP_HOME; else in the store, where that is a folder.

    Raises:
        ConfigError: a value cannot be used.
    """
    if home is not None:
        values["home"] = home
    elif not os.environ.get("WATCHSTEP_HOME") and not checked_scheme(store):
        values["home"] = Path(store).expanduser().absolute() / ".watchstep"
    return load_settings(store=store, **values)
