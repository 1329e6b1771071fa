"""Several changes of an alert as one: what an alert that fires names is told as it is known by now.

Judging says each change by itself, so that rows in blocks of any size say the same. Who tells people of all changes of an
evaluation, or of a whole run, tells them once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from watchstep_rules.engine.alert_memory import Phase, Transition


def as_told(transitions: Iterable[Transition]) -> list[Transition]:
    """Changes with each revision taken into the firing before it, where that is among them.

    A firing that was revised says what the last revision says. Of revisions of one that is not among them the last is left, as a
    revision.
    """
    told: list[Transition] = []
    for change in transitions:
        if change.revised and told and told[-1].phase is Phase.FIRING:
            before = told[-1]
            told[-1] = replace(change, inhibited_by=before.inhibited_by, revised=before.revised)
        else:
            told.append(change)
    return told
