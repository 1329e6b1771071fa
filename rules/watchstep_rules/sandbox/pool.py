"""Children that are kept between evaluations, one program each; those that die wait longer each time."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from watchstep.errors import RuleError
from watchstep_rules.sandbox.process import Child, DeadError, Program

MAX_IDLE = 4
"""How many children wait for work, of all programs together."""

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_now = time.monotonic


@dataclass
class _Deaths:
    """Of a program: how many in a row, when the next may start, and what was said of the last."""

    number: int = 0
    until: float = 0.0
    last: str = ""


@dataclass
class Pool:
    """Thread-safe. A child serves one caller at a time; a second caller of a program gets a second child."""

    _idle: list[Child] = field(default_factory=list)
    _deaths: dict[Program, _Deaths] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def child(self, program: Program) -> Iterator[Child]:
        """A child that has the program loaded.

        Raises:
            DeadError: it does not start, or died so lately that none is started yet.
            RuleError: the program is at fault.
        """
        child = self._taken(program)
        try:
            if child is None:
                self._check_pause(program)
                child = _started(program)
            yield child
        except DeadError as error:
            self._died(program, error)
            if child is not None:
                child.close()
            raise
        except BaseException:
            if child is not None:
                self._give_back(child)
            raise
        with self._lock:
            self._deaths.pop(program, None)
        self._give_back(child)

    def close(self) -> None:
        """End all that wait."""
        with self._lock:
            waiting, self._idle = self._idle, []
        for child in waiting:
            child.close()

    def forget(self) -> None:
        """In a forked process: the children are the parent's, and end when it closes its ends."""
        for child in self._idle:
            child.abandon()
        self._idle, self._deaths, self._lock = [], {}, threading.Lock()

    def _taken(self, program: Program) -> Child | None:
        with self._lock:
            for child in [child for child in reversed(self._idle) if child.program == program]:
                self._idle.remove(child)
                if child.alive:
                    return child
                child.close()
        return None

    def _give_back(self, child: Child) -> None:
        with self._lock:
            done = child.retired or not child.alive
            if not done:
                self._idle.append(child)
            over = [child] if done else self._idle[:-MAX_IDLE]
            self._idle = self._idle[-MAX_IDLE:]
        for old in over:
            old.close()

    def _check_pause(self, program: Program) -> None:
        with self._lock:
            deaths = self._deaths.get(program)
            if deaths is not None and _now() < deaths.until:
                left = deaths.until - _now()
                raise DeadError(
                    f"{deaths.last}; {deaths.number} times in a row, started again in {left:.0f} s",
                    "correct the rule",
                ) from None

    def _died(self, program: Program, error: DeadError) -> None:
        with self._lock:
            deaths = self._deaths.setdefault(program, _Deaths())
            if _now() < deaths.until:
                return  # it was not even started
            deaths.number += 1
            deaths.last = error.what
            deaths.until = _now() + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (deaths.number - 1))


def _started(program: Program) -> Child:
    """A child; a program that cannot be loaded waits for its next try as well as one that dies."""
    try:
        return Child(program)
    except DeadError:
        raise
    except RuleError as error:
        raise DeadError(error.what, error.mend) from error


POOL = Pool()
"""This process's children."""

atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.forget)
