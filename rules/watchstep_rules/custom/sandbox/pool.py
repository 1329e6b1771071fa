"""Children that are kept between requests, and how many there may be at once."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from watchstep.errors import RuleError
from watchstep_rules.custom.sandbox.process import Child, DeadError, Runnable, StartError

MAX_IDLE = 4
"""How many children wait for work, of all programs together."""

Share = Literal["rules", "checks", "queries"]
"""What a child works for: evaluating rules, checking rule configs, or answering queries. Each has children of its own, so
that nobody's queries or rule files keep rules from being evaluated."""

DEFAULT_PROCESSES: dict[Share, int] = {"rules": 8, "checks": 2, "queries": 4}
"""How many children work at once for each."""

DEFAULT_MEMORY_MB = 2048
"""MiB that one rule may ask for. With as many processes for rules, it bounds the memory of all rules together."""

_WAIT_SECONDS: dict[Share, float] = {"rules": 20.0, "checks": 20.0, "queries": 0.0}
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_MOST_DEATHS = 1000
_now = time.monotonic
_project: ContextVar[str] = ContextVar("_project", default="")


@contextmanager
def on_behalf_of(project: str) -> Iterator[None]:
    """In the ``with`` block, children work for a project: one that dies delays no other project's."""
    token = _project.set(project)
    try:
        yield
    finally:
        _project.reset(token)


class BusyError(StartError):
    """As many children work as may work at once."""


@dataclass
class _Deaths:
    """Of a program: how many in a row, when the next may start, and what was said of the last."""

    number: int = 0
    until: float = 0.0
    last: str = ""
    kind: type[DeadError] = DeadError


@dataclass
class Pool:
    """Thread-safe. A child serves one caller at a time; a second caller of a program gets a second child.

    Attributes:
        processes: how many children work at once for each share; who finds none free waits for up to 20 s, and a query
            is refused at once.
        memory_mb: MiB that one rule may ask for.
    """

    processes: dict[Share, int] = field(default_factory=lambda: dict(DEFAULT_PROCESSES))
    memory_mb: int = DEFAULT_MEMORY_MB
    _working: Counter[Share] = field(default_factory=Counter)
    _idle: list[Child] = field(default_factory=list)
    _deaths: dict[Hashable, _Deaths] = field(default_factory=dict)
    _lock: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def child(
        self, program: Runnable, share: Share = "rules", culprit: Hashable | None = None
    ) -> Iterator[Child]:
        """A child that has the program loaded.

        Args:
            program: what it was started for.
            share: what it works for.
            culprit: who is at fault if it dies, and has to wait before the next is started; the program where it is None.
                The same of another project (`on_behalf_of`) does not wait.

        Raises:
            BusyError: all children of the share work.
            StartError: no child can be started.
            DeadError: the child died, or died so lately that none is started yet.
            RuleError: the program is at fault.
        """
        fault = (_project.get(), program if culprit is None else culprit)
        with self._place(program, share):
            child = self._taken(program)
            try:
                if child is None or culprit is not None:
                    self._check_pause(fault)
                if child is None:
                    child = _started(program)
                yield child
            except DeadError as error:
                self._died(fault, error)
                if child is not None and child.alive:
                    self._give_back(child)
                elif child is not None:
                    child.close()
                raise
            except RuleError:
                if child is not None:
                    self._give_back(child)
                raise
            except (
                BaseException
            ):  # in the middle of an exchange, perhaps: its next message would be taken for another's
                if child is not None:
                    child.close()
                raise
            with self._lock:
                self._deaths.pop(fault, None)
            self._give_back(child)

    def check_memory(self, called: str, memory_mb: int) -> None:
        """See that a rule asks for no more memory than one may have.

        Raises:
            RuleError: it does.
        """
        if memory_mb > self.memory_mb:
            raise RuleError(
                f"{called}: memory_mb = {memory_mb}, over the {self.memory_mb} MiB that a rule may have here",
                "lower memory_mb, or raise WATCHSTEP_RULE_MEMORY_MB",
            )

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
        self._idle, self._deaths, self._lock = [], {}, threading.Condition()
        self._working = Counter()

    @contextmanager
    def _place(self, program: Runnable, share: Share) -> Iterator[None]:
        deadline = _now() + _WAIT_SECONDS[share]
        with self._lock:
            while self._working[share] >= self.processes[share]:
                left = deadline - _now()
                if left <= 0:
                    raise BusyError(
                        f"{program.called}: all {self.processes[share]} processes for {share} are at work",
                        "try again, or allow more (WATCHSTEP_RULE_PROCESSES, WATCHSTEP_QUERY_PROCESSES)",
                    )
                self._lock.wait(left)
            self._working[share] += 1
        try:
            yield
        finally:
            with self._lock:
                self._working[share] -= 1
                self._lock.notify()

    def _taken(self, program: Runnable) -> Child | None:
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

    def _check_pause(self, fault: Hashable) -> None:
        with self._lock:
            deaths = self._deaths.get(fault)
            if deaths is not None and _now() < deaths.until:
                left = deaths.until - _now()
                raise deaths.kind(
                    f"{deaths.last}; {deaths.number} times in a row, started again in {left:.0f} s",
                    "correct the rule",
                ) from None

    def _died(self, fault: Hashable, error: DeadError) -> None:
        with self._lock:
            if fault not in self._deaths and len(self._deaths) >= _MOST_DEATHS:
                self._deaths.pop(next(iter(self._deaths)))
            deaths = self._deaths.setdefault(fault, _Deaths())
            if _now() < deaths.until:
                return  # it was not even started
            deaths.number += 1
            deaths.last = error.what
            deaths.kind = StartError if isinstance(error, StartError) else DeadError
            deaths.until = _now() + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (deaths.number - 1))


def _started(program: Runnable) -> Child:
    """A child; a program that cannot be loaded waits for its next try as well as one that dies."""
    try:
        return Child(program)
    except DeadError:
        raise
    except RuleError as error:
        raise DeadError(error.what, error.hint) from error


POOL = Pool()
"""This process's children."""


def limit_processes(rules: int, queries: int, memory_mb: int = DEFAULT_MEMORY_MB) -> None:
    """Set how many children of this process work at once.

    Args:
        rules: for evaluating rules; a quarter of as many check rule configs.
        queries: for answering queries.
        memory_mb: MiB that one rule may ask for.
    """
    POOL.memory_mb = memory_mb
    POOL.processes = {"rules": rules, "checks": max(1, rules // 4), "queries": queries}


atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.forget)
