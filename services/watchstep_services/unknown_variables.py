"""Variables of the environment that look like settings and are none: most often a name that was misspelt."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator

from watchstep_services.settings import PREFIX, Settings

_log = logging.getLogger(__name__)

OF_OTHERS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "ATTEMPT",
        "CREDENTIALS",
        "FIRST_STEP",
        "IDLE_SECONDS",
        "JOBS",
        "LAUNCH",
        "LAUNCHED",
        "ON_STOP",
        "OVERHEAD_BUDGET",
        "PROBES",
        "PROJECT",
        "QUIET",
        "RECORDER_TOKEN",
        "RESTARTS",
        "RESUME_FROM",
        "RUN",
        "SERVICE",
        "SPILL",
        "STORE",
        "STORE_ID",
        "TOKEN",
    )
)
"""What the recorder and the command line read; docs/settings.md has them too."""

OPEN_ENDED = (f"{PREFIX}RECEIVER_",)
"""Beginnings of names that the user chooses."""


def known_variables() -> frozenset[str]:
    """Every variable that something reads."""
    return OF_OTHERS | {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}


def unknown_variables(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Variables that nothing reads, and of each what was meant, or an empty text.

    Kubernetes' own, which it makes of a service's name, are not among them.
    """
    known = known_variables()
    for name in sorted(names):
        upper = name.upper()
        if (
            not upper.startswith(PREFIX)
            or upper in known
            or upper.startswith(OPEN_ENDED)
            or _of_kubernetes(upper)
        ):
            continue
        close = difflib.get_close_matches(upper, known, n=1, cutoff=0.75)
        yield name, close[0] if close else ""


def warn_of_unknown(names: Iterable[str]) -> None:
    """Say in the log which variables are not known."""
    for name, meant in unknown_variables(names):
        _log.warning(
            "%s is no setting, and nothing reads it%s", name, f"; did you mean {meant}?" if meant else ""
        )


def _of_kubernetes(name: str) -> bool:
    return name.endswith(
        ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_TCP_ADDR", "_TCP_PORT", "_TCP_PROTO")
    ) or ("_SERVICE_PORT_" in name)
