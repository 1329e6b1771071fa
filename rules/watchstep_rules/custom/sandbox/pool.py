"""Pool of child processes: reuses children between requests and limits their number."""

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
"""Maximum number of idle children, over all programs."""

Share = Literal["rules", "checks", "queries"]
"""The purpose of a child: evaluating rules, checking rule configs, or answering queries. Each share has separate children, so
queries and rule files cannot block the evaluation of rules."""

DEFAULT_PROCESSES: dict[Share, int] = {"rules": 8, "checks": 2, "queries": 4}
"""Maximum number of busy children of each share."""

DEFAULT_MEMORY_MB = 2048
"""Maximum memory that a rule may request, in MiB. Times the number of rule processes, it bounds the memory of all rules."""

_WAIT_SECONDS: dict[Share, float] = {"rules": 20.0, "checks": 20.0, "queries": 0.0}
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_MOST_DEATHS = 1000
_now = time.monotonic
_project: ContextVar[str] = ContextVar("_project", default="")


@contextmanager
def on_behalf_of(project: str) -> Iterator[None]:
    """Attribute the children of the ``with`` block to a project, so that a child that dies delays no other project."""
    token = _project.set(project)
    try:
        yield
    finally:
        _project.reset(token)


class BusyError(StartError):
    """All children of a share are busy."""


@dataclass
class _Deaths:
    """Deaths of a program: their number in a row, when the next child may start, and the last error."""

    number: int = 0
    until: float = 0.0
    last: str = ""
    kind: type[DeadError] = DeadError


@dataclass
class Pool:
    """A thread-safe pool of children. A child serves one caller at a time; a second caller of a program gets a second child.

    Attributes:
        processes: maximum number of busy children of each share. A caller waits up to 20 s for a free child; a query is
            refused at once.
        memory_mb: maximum memory that a rule may request, in MiB.
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
        """Provide a child that has loaded the program.

        Args:
            program: the program.
            share: the purpose.
            culprit: the key that is blamed if the child dies, and that must wait before the next child starts; None for
                the program. The same key in another project (`on_behalf_of`) does not wait.

        Raises:
            BusyError: all children of the share are busy.
            StartError: no child can be started.
            DeadError: the child died, or died so recently that no new child is started yet.
            RuleError: the program failed.
        """
        fault = (_project.get(), program if culprit is None else culprit)
        with self._slot(program, share):
            child = self._take_idle(program)
            try:
                if child is None or culprit is not None:
                    self._check_pause(fault)
                if child is None:
                    child = _start(program)
                yield child
            except DeadError as error:
                self._record_death(fault, error)
                if child is not None and child.alive:
                    self._return(child)
                elif child is not None:
                    child.close()
                raise
            except RuleError:
                if child is not None:
                    self._return(child)
                raise
            except (
                BaseException
            ):  # possibly mid-exchange: its next message would be mistaken for the reply to another request
                if child is not None:
                    child.close()
                raise
            with self._lock:
                self._deaths.pop(fault, None)
            self._return(child)

    def check_memory(self, called: str, memory_mb: int) -> None:
        """Check the memory that a rule requests.

        Raises:
            RuleError: the request exceeds the limit.
        """
        if memory_mb > self.memory_mb:
            raise RuleError(
                f"{called}: memory_mb = {memory_mb}, over the {self.memory_mb} MiB that a rule may have here",
                "lower memory_mb, or raise WATCHSTEP_RULE_MEMORY_MB",
            )

    def close(self) -> None:
        """End all idle children."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def forget(self) -> None:
        """Drop all children in a forked process. They belong to the parent and end when the parent closes its pipes."""
        for child in self._idle:
            child.abandon()
        self._idle, self._deaths, self._lock = [], {}, threading.Condition()
        self._working = Counter()

    @contextmanager
    def _slot(self, program: Runnable, share: Share) -> Iterator[None]:
        deadline = _now() + _WAIT_SECONDS[share]
        with self._lock:
            while self._working[share] >= self.processes[share]:
                remaining = deadline - _now()
                if remaining <= 0:
                    raise BusyError(
                        f"{program.called}: all {self.processes[share]} processes for {share} are at work",
                        "try again, or allow more (WATCHSTEP_RULE_PROCESSES, WATCHSTEP_QUERY_PROCESSES)",
                    )
                self._lock.wait(remaining)
            self._working[share] += 1
        try:
            yield
        finally:
            with self._lock:
                self._working[share] -= 1
                self._lock.notify()

    def _take_idle(self, program: Runnable) -> Child | None:
        with self._lock:
            for child in [child for child in reversed(self._idle) if child.program == program]:
                self._idle.remove(child)
                if child.alive:
                    return child
                child.close()
        return None

    def _return(self, child: Child) -> None:
        with self._lock:
            retired = child.retired or not child.alive
            if not retired:
                self._idle.append(child)
            surplus = [child] if retired else self._idle[:-MAX_IDLE]
            self._idle = self._idle[-MAX_IDLE:]
        for surplus_child in surplus:
            surplus_child.close()

    def _check_pause(self, fault: Hashable) -> None:
        with self._lock:
            deaths = self._deaths.get(fault)
            if deaths is not None and _now() < deaths.until:
                remaining = deaths.until - _now()
                raise deaths.kind(
                    f"{deaths.last}; {deaths.number} times in a row, started again in {remaining:.0f} s",
                    "correct the rule",
                ) from None

    def _record_death(self, fault: Hashable, error: DeadError) -> None:
        with self._lock:
            if fault not in self._deaths and len(self._deaths) >= _MOST_DEATHS:
                self._deaths.pop(next(iter(self._deaths)))
            deaths = self._deaths.setdefault(fault, _Deaths())
            if _now() < deaths.until:
                return  # no child was started
            deaths.number += 1
            deaths.last = error.what
            deaths.kind = StartError if isinstance(error, StartError) else DeadError
            deaths.until = _now() + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (deaths.number - 1))


def _start(program: Runnable) -> Child:
    """Start a child. A program that cannot be loaded waits for its next attempt like one that dies."""
    try:
        return Child(program)
    except DeadError:
        raise
    except RuleError as error:
        raise DeadError(error.what, error.hint) from error


POOL = Pool()
"""The children of this process."""


def limit_processes(rules: int, queries: int, memory_mb: int = DEFAULT_MEMORY_MB) -> None:
    """Set the maximum number of busy children of this process.

    Args:
        rules: children that evaluate rules; a quarter of this number check rule configs.
        queries: children that answer queries.
        memory_mb: maximum memory that a rule may request, in MiB.
    """
    POOL.memory_mb = memory_mb
    POOL.processes = {"rules": rules, "checks": max(1, rules // 4), "queries": queries}


atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.forget)
