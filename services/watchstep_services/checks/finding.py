"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from watchstep.errors import WatchstepError

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class CheckFinding:
    """One line of the table.

    Attributes:
        what: what was tried.
        state: ``warning``: it works, and may not be what is meant; ``failed``: it does not work.
        detail: what was found.
        hint: what to do about it.
    """

    what: str
    state: State
    detail: str
    hint: str = ""

    def as_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def failed(what: str, error: Exception, hint: str = "") -> CheckFinding:
    """A check that raised."""
    if isinstance(error, WatchstepError):
        return CheckFinding(what, "failed", error.what, error.hint)
    return CheckFinding(what, "failed", f"{type(error).__name__}: {error}".split("\n", 1)[0][:500], hint)
