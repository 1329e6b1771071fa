"""What workers answer to a stop on which they are to agree: objects whose names say it all."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Literal, cast

from watchstep.layout import STOPS, check_name
from watchstep.store import Store

AnswerState = Literal["ready", "passed", "left", "refuses"]
"""
======= ====================================================================================================
ready   it has not finished the step yet, and will not go beyond it before it is told more
passed  it had finished the step before it heard of it
left    it was ready, has waited at the step for as long as it does, and goes on
refuses its program has not agreed to be stopped so
======= ====================================================================================================
"""

_KEY = re.compile(
    rf"{STOPS}[^/]+/(?P<asked>\d{{1,19}})/(?P<worker>\d{{1,9}})-(?P<state>ready|passed|left|refuses)-(?P<at>\d{{1,19}})\.json"
)


@dataclass(frozen=True)
class StopAnswer:
    """A worker's answer.

    Attributes:
        worker: its rank.
        asked: the step that it was asked to stop at.
        state: see `AnswerState`.
        at: the last step that it had finished, 0 before the first.
    """

    worker: int
    asked: int
    state: AnswerState
    at: int

    def key(self, attempt: str) -> str:
        """Its object, relative to the run."""
        return f"{_prefix(attempt, self.asked)}{self.worker}-{self.state}-{self.at}.json"

    def encode(self) -> bytes:
        """The object's bytes; readers need no more than its name."""
        return json.dumps(asdict(self)).encode()


def find_answers(run_store: Store, attempt: str, asked: int) -> list[StopAnswer]:
    """What the workers of an attempt have answered of one step, by one listing.

    Raises:
        StoreError: the store does not answer.
    """
    found = (_KEY.fullmatch(entry.key) for entry in run_store.entries(_prefix(attempt, asked)))
    return [
        StopAnswer(int(one["worker"]), int(one["asked"]), cast("AnswerState", one["state"]), int(one["at"]))
        for one in found
        if one is not None
    ]


def _prefix(attempt: str, asked: int) -> str:
    return f"{STOPS}{check_name('attempt', attempt)}/{asked}/"
