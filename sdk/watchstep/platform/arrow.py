"""pyarrow, which reading recorded runs requires and recording does not."""

from __future__ import annotations

import importlib.util
import sys

from watchstep.errors import ConfigError


def require_arrow(what: str) -> None:
    """Check that pyarrow is installed.

    Args:
        what: what requires it, for the message.

    Raises:
        ConfigError: it is not installed.
    """
    if "pyarrow" in sys.modules:
        installed = sys.modules["pyarrow"] is not None
    else:
        installed = importlib.util.find_spec("pyarrow") is not None
    if not installed:
        raise ConfigError(f"{what} needs pyarrow, which is not installed", "pip install 'watchstep[read]'")
