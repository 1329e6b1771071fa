"""A training whose thread stays at one line: found by looking at its stack from another thread.

No step has ended for much longer than usual, and the training thread does not move: at each of several looks it is at the same instruction of the same calls. A long
evaluation, a checkpoint that is written in parts, a compilation in Python or a data set that is prepared moves. The looks cost the training thread nothing.

**Not judged:** the time before `_FIRST_STEPS` steps have ended; time in which the process did not run, such as after SIGSTOP or on a sleeping laptop; a thread in a debugger, at a
prompt, in a sleep, a compiler or a loop that waits for requests, or one that waits for a child process.
"""

from __future__ import annotations

import linecache
import re
import statistics
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from watchstep.capture.health import RecorderHealth

_USUAL_STEPS = 30.0
"""Multiple of the usual time of a step: below it, a step is slow, and does not hang."""

_USUAL_STILL = 1.5
"""Multiple of the longest time for which the thread was at one place before: a dispatch of many steps at once, such as a scan, ends them together after a long call."""

_FIRST_STEPS = 3
_LOOKS = 5
_SPREAD = 1 / 3
"""Part of the limit over which the looks at a thread that does not move are spread."""

_LOOK_EVERY = 1 / 16
"""Part of the limit between two looks."""

_PAUSED, _LEAST_PAUSED = 1 / 4, 10.0
"""Part of the limit, and seconds, without any look, after which the process is taken for paused."""

_REPEATED_SECONDS = 60.0
_MOST_CHARACTERS = 3_500
_MOST_IN_PLACE = 200
_DEBUGGERS = frozenset(
    {"pdb", "bdb", "code", "codeop", "IPython", "ipykernel", "debugpy", "pydevd", "subprocess"}
)
"""Modules with a thread that waits for a person or for another program."""

_LOOPS, _LOOP_FRAMES = frozenset({"asyncio", "socketserver", "ray", "tornado", "uvloop"}), 3
"""Modules of loops in which a thread waits for requests once a training has ended, and the number of innermost calls in which they show."""

_COMPILERS = re.compile(r"(jax|jaxlib|torch\._dynamo|torch\._inductor|triton|tensorflow|keras)(\.|$)")
_WAITS = re.compile(r"\b(sleep|input|breakpoint|getpass)\s*\(")
_LIBRARY = tuple(
    {
        f"{Path(path)}/"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(name))
    }
)
_OWN = f"{Path(__file__).parents[2]}/"

_Stack = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class Stall:
    """What is recorded of a stall.

    Attributes:
        step: the current step.
        seconds: since the last one ended.
        place: the line of the program, and the innermost call.
    """

    step: int
    seconds: float
    place: str


@dataclass(frozen=True)
class StepProgress:
    """How far a training is.

    Attributes:
        step: the current step.
        finished: number of the last step that has ended.
        thread: id of the thread that ended it; 0 before the first one.
    """

    step: int
    finished: int
    thread: int


class StallWatch:
    """Looks at one training. Used by one thread, which is not that of the training."""

    def __init__(
        self,
        progress: Callable[[], StepProgress],
        health: RecorderHealth,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin.

        Args:
            progress: How far the training is.
            health: Receives the note, which is also logged.
            seconds: Least time without the end of a step.
            clock: Seconds.
        """
        self._progress, self._health, self._seconds, self._clock = progress, health, seconds, clock
        self._usual: deque[float] = deque(maxlen=9)
        self._first = self._last = progress().finished
        self._ended = self._looked = clock()
        self._stack: _Stack = ()
        self._still_since, self._looks, self._longest = clock(), 0, 0.0
        self._stall: Stall | None = None
        self._recorded = 0.0

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return self._seconds * _LOOK_EVERY

    def look(self) -> Stall | None:
        """Look if it is time. Returns what is to be recorded now; None for nothing. Never raises."""
        now = self._clock()
        since, self._looked = now - self._looked, self._looked
        if since < self.interval:
            return None
        self._looked = now
        try:
            return self._look(now, since)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("stall", error)
            return None

    def _look(self, now: float, since: float) -> Stall | None:
        progress = self._progress()
        thread = progress.thread or threading.main_thread().ident
        frame = sys._current_frames().get(thread or 0)  # noqa: SLF001 - the documented way to the frames of threads
        is_paused = since > max(_LEAST_PAUSED, self._seconds * _PAUSED)
        has_ended = progress.finished != self._last
        is_still = frame is not None and self._is_still(frame, now, has_ended=has_ended, is_paused=is_paused)
        if has_ended:
            if self._last >= self._first:
                self._usual.append((now - self._ended) / max(1, progress.finished - self._last))
            self._last, self._ended = progress.finished, now
            if self._stall is not None:
                self._stall = None
                self._health.withdraw("stall")
        if is_paused:
            self._ended += since
        if frame is None or not is_still or progress.finished - self._first < _FIRST_STEPS or not self._usual:
            return None
        silent = now - self._ended
        limit = max(
            self._seconds, _USUAL_STEPS * statistics.median(self._usual), _USUAL_STILL * self._longest
        )
        if silent < limit or now - self._still_since < _SPREAD * limit or self._looks < _LOOKS:
            return None
        if self._stall is not None and now - self._recorded < _REPEATED_SECONDS:
            return None
        if self._stall is None:
            self._report(progress.finished, silent, frame)
        self._recorded = now
        self._stall = Stall(progress.step, silent, _place(frame))
        return self._stall

    def _is_still(self, frame: FrameType, now: float, *, has_ended: bool, is_paused: bool) -> bool:
        """Return whether the thread is where it was at the last look, and waits for nothing that may take any time."""
        stack = tuple((each.f_code, each.f_lasti) for each in _frames(frame))
        takes_any_time = _may_take_any_time(frame)
        if has_ended or is_paused or takes_any_time or stack != self._stack:
            if self._looks > 1 and not is_paused:
                self._longest = max(self._longest, now - self._still_since)
            self._stack, self._still_since, self._looks = stack, now, 0
        self._looks = 0 if takes_any_time else self._looks + 1
        return self._looks > 1

    def _report(self, last: int, silent: float, frame: FrameType) -> None:
        usual = statistics.median(self._usual)
        text = f"no step has ended for {silent:.0f} s, since step {last} (usual: {usual:.2g} s), and the training thread does not move: it is at {_place(frame)}"
        self._health.warn("stall", text)
        lines = [
            f"{each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_name}" for each in _frames(frame)
        ]
        self._health.note("stall", f"{text}; stack, innermost first: {'; '.join(lines)}"[:_MOST_CHARACTERS])


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _may_take_any_time(frame: FrameType) -> bool:
    """Return whether a thread waits for a person, a request, a child process, a sleep or a compiler."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if _WAITS.search(line):
        return True
    for depth, each in enumerate(_frames(frame)):
        module = str(each.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package in _DEBUGGERS or (package in _LOOPS and depth < _LOOP_FRAMES):
            return True
        if "compile" in each.f_code.co_name and _COMPILERS.match(module):
            return True
    return False


def _place(frame: FrameType) -> str:
    """Return the innermost line of the program, and the innermost call if that is not of the program."""
    own = next((each for each in _frames(frame) if _is_of_program(each.f_code.co_filename)), None)
    inner = f"{_short(frame)}"
    if own is None or own is frame:
        return inner[:_MOST_IN_PLACE]
    return (
        f"{_short(own)}, in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"[
            :_MOST_IN_PLACE
        ]
    )


def _short(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_of_program(file: str) -> bool:
    return not (file.startswith((*_LIBRARY, _OWN, "<")) or "site-packages" in file)
