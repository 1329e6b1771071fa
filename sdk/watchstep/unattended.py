"""Hooks of programs that `watchstep run` starts unmodified: one per rank and training on a machine, created at the first update.

A hook observes the framework that made the first update. Updates of another one in the same process are not observed, which is said once.
"""

from __future__ import annotations

import logging
import weakref

from watchstep.capture.rank_claim import claim_rank, holds_claim
from watchstep.capture.shutdown.ending import live
from watchstep.hook import Hook

_log = logging.getLogger("watchstep")


class _Recorded:
    """What this process records, or has recorded.

    Attributes:
        framework: the framework of the last hook.
        hook: that hook; None if it does not exist any more.
        others: frameworks whose updates are not observed.
    """

    def __init__(self) -> None:
        self.framework = ""
        self.hook: weakref.ref[Hook] | None = None
        self.others: list[str] = []

    @property
    def open_hook(self) -> Hook | None:
        """The last hook if it is open."""
        hook = None if self.hook is None else self.hook()
        return None if hook is None or hook._ending.ended else hook  # noqa: SLF001 - part of the hook's own package


_recorded = _Recorded()


def start_hook(framework: str, *, run: str | None = None, later_from: int | None = None) -> Hook | None:
    """Create the hook of this process.

    Args:
        framework: the framework that makes the updates. Those that observe the same updates have the same name.
        run: id of the run of a later training of this process, which has claimed its rank.
        later_from: the first step of such a training, as an attempt of the same run.

    Returns:
        An open hook; None if the program records itself, another framework or another process records this rank. Faults of the
        hook's start are logged, because the program did not request a recorder and must continue without one.
    """
    try:
        if live():
            note_unobserved(framework)
            return None
        faults: list[OSError] = []
        if run is None and later_from is None:
            if holds_claim():
                note_unobserved(framework)
                return None
            if not claim_rank(faults.append):
                return None
        hook = Hook(run=run, first_step=later_from)
        for fault in faults:
            hook._health.fault("claim", fault)  # noqa: SLF001 - part of the hook's own package
        _recorded.framework, _recorded.hook = framework, weakref.ref(hook)
    except Exception as error:  # noqa: BLE001 - no fault may end the program
        _log.error("watchstep: not recording: %s", error)
        return None
    return hook


def note_unobserved(framework: str) -> None:
    """Say once that updates of a framework are not observed, because this process records or has recorded another one.

    Nothing is said if the program records itself.

    Args:
        framework: the framework that makes the updates.
    """
    hook = _recorded.open_hook
    is_own = hook is None and bool(live())
    if is_own or framework in {"", _recorded.framework, *_recorded.others} or not _recorded.framework:
        return
    _recorded.others.append(framework)
    text = (
        f"updates of {' and '.join(_recorded.others)} are not observed, because this process "
        f"{'has recorded' if hook is None else 'records'} those of {_recorded.framework}: NaN in them stops nothing"
    )
    _log.warning("watchstep: %s", text)
    if hook is not None:
        hook._health.note("frameworks", text)  # noqa: SLF001 - part of the hook's own package
