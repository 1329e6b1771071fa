"""One worker's part in stopping at the same step as all others, or not at all.

The service names a step and asks whether all can stop there. A worker that has not finished it says that it is ready, and from then
on does not go beyond it; one that has says so, and another step is named. When all are ready, and only then, the step is
agreed on. Should a worker come to the step before that, it waits there: the others may have to be told of another step, and
a worker that went on, or stopped by itself, would leave them in a collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from watchstep.control import StopRequest
from watchstep.stop_answers import StopAnswer

PATIENCE_SECONDS = 120.0
"""How long a worker waits at a step that is not agreed on: longer than any other takes to hear of it, and less than collectives wait."""

Wait = Literal["wait"]


@dataclass(frozen=True)
class _Heard:
    request: StopRequest
    state: Literal["hearing", "ready", "passed", "agreed"]


class CommonStop:
    """What a worker has heard of a stop, and whether it is to stop now.

    Heard on one thread, asked of on the training thread, without a lock between them: what was heard is replaced as a whole, and a
    step is marked as finished before it is looked whether to stop there.
    """

    def __init__(
        self,
        worker: int,
        finished: Callable[[], int],
        *,
        takes_part: bool,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """Nothing was heard.

        Args:
            worker: the rank.
            finished: the last step that is finished; never too small.
            takes_part: whether the program has agreed to be stopped.
            patience: seconds to wait at a step that is not agreed on.
        """
        self._worker = worker
        self._finished = finished
        self._takes_part = takes_part
        self._patience = patience
        self._heard: _Heard | None = None
        self._left: StopRequest | None = None
        self._changed = threading.Event()
        self.left: Callable[[StopAnswer], None] = lambda _: None
        """Told when the worker goes on from a step at which it was ready to stop."""

    @property
    def request(self) -> StopRequest | None:
        """What was heard last."""
        return None if self._heard is None else self._heard.request

    def hear(self, request: StopRequest) -> StopAnswer | None:
        """A stop is asked for, or agreed on; the answer, where one is due. Not on the training thread."""
        if self._heard is not None and self._heard.request == request:
            return None
        if request.agreed:
            self._heard = _Heard(request, "agreed")
            self._changed.set()
            return None
        if not self._takes_part:
            return self._answer(request, "refuses")
        # In this order: from here on whoever finishes the step waits for what is found next.
        self._heard = _Heard(request, "hearing")
        state: Literal["ready", "passed"] = "ready" if self._finished() < request.step else "passed"
        self._heard = _Heard(request, state)
        self._changed.set()
        return self._answer(request, state)

    def look(self, step: int) -> StopRequest | Wait | None:
        """Whether to stop after a step that is finished: the request, or None to go on, or that it is to be waited for."""
        heard = self._heard
        if heard is None or step < heard.request.step or heard.state == "passed":
            return None
        if heard.state == "agreed":
            return heard.request
        waits = step == heard.request.step and self._left != heard.request
        return "wait" if waits else None

    def due(self, step: int) -> StopRequest | None:
        """The stop that is due after a step that is finished. On the training thread; where one is asked for it may wait."""
        if self._heard is None:
            return None
        deadline = time.monotonic() + self._patience
        while True:
            self._changed.clear()
            found = self.look(step)
            if found != "wait":
                return found
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                self.leave()

    def leave(self) -> None:
        """Wait no more at the step that is asked for now: go on, and say so. Any thread; nothing where it is not waited for."""
        heard = self._heard
        if heard is None or heard.state in {"agreed", "passed"} or self._left == heard.request:
            return
        self._left = heard.request
        self._changed.set()
        self.left(self._answer(heard.request, "left"))

    def _answer(
        self, request: StopRequest, state: Literal["ready", "passed", "left", "refuses"]
    ) -> StopAnswer:
        return StopAnswer(self._worker, request.step, state, max(0, self._finished()))
