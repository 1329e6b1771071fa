"""Inside one of the service's processes: at a point for which a token lies there, take it and do what it says."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path

from watchstep_services.core.due_action import DueAction
from watchstep_services.runs.claim import Claim

KILL, PAUSE = "kill", "pause"
_OVER = frozenset(
    {
        "evaluate.fenced", "evaluate.committed", "evaluate.released", "dispatch.recorded", "evaluate.claiming", "dispatch.claiming", "sweep.found",
        "announce.accepting",
    }
)  # fmt: skip
"""Where the work that a paused process held is over, one way or the other."""


class PointListener:
    """Tokens are files ``<folder>/points/<point>/<effect>-<number>``; whoever renames one has taken it.

    The effects ``kill`` (SIGKILL to itself) and ``pause`` (SIGSTOP to itself) are done here; any other is asked of the
    harness, which does it before the process goes on. A process that was paused goes on with what it had
    begun, leaves a note of the point at which that was over, and is killed.
    """

    def __init__(self, folder: Path, harness: str) -> None:
        self._points, self._taken = folder / "points", folder / "taken"
        self._harness = harness
        self._paused, self._thread = "", 0

    def __call__(self, name: str, subject: object) -> None:
        """A point is reached."""
        if self._paused and (name not in _OVER or threading.get_ident() != self._thread):
            return  # work of its other threads has leases of its own
        if self._paused:
            note = {"point": name, "pid": os.getpid()}
            self._note(f"{self._paused}.resumed", note)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            waiting = os.listdir(self._points / name)  # noqa: PTH208 - names are what is wanted, at every point
        except FileNotFoundError:
            return
        for token in waiting:
            try:
                (self._points / name / token).rename(self._taken / f"{token}.token")
            except FileNotFoundError:
                continue  # another process was faster
            self._do(token, name, subject)
            return

    def _do(self, token: str, name: str, subject: object) -> None:
        effect = token.partition("-")[0]
        self._note(token, {"point": name, "pid": os.getpid(), "effect": effect, **_told(subject)})
        if effect == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif effect == PAUSE:
            self._paused, self._thread = token, threading.get_ident()
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            request = urllib.request.Request(f"{self._harness}/faults/{effect}", b"", method="POST")
            with urllib.request.urlopen(request, timeout=60):
                pass

    def _note(self, name: str, facts: dict[str, object]) -> None:
        partial = self._taken / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(facts))
        partial.rename(self._taken / f"{name}.json")


def _told(subject: object) -> dict[str, object]:
    if isinstance(subject, Claim):
        return {"run_id": subject.run_id, "epoch": subject.epoch}
    if isinstance(subject, DueAction):
        return {"action_id": subject.id, "claims": subject.claims}
    return {}
