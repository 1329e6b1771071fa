"""Threads shared fairly between projects: slow or hanging work of one project delays the others by at most one turn."""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Key = tuple[str, str]
"""Project and subject."""


class FairThreads:
    """Executes the oldest work of each project in turn. Thread-safe.

    Args:
        threads: number of threads.
        name: prefix of the threads' names.
        per_project: limit of threads for one project.
        per_subject: limit of threads for one subject of a project, such as one of its receivers; None for
            the project's limit.
    """

    def __init__(self, threads: int, name: str, per_project: int, per_subject: int | None = None) -> None:
        self._threads = threads
        self._per_project = max(1, per_project)
        self._per_subject = self._per_project if per_subject is None else max(1, per_subject)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[_Key, Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._of_project: Counter[str] = Counter()
        self._of_subject: Counter[_Key] = Counter()
        self._closed = False

    def submit(self, project: str, work: Callable[[], _Result], subject: str = "") -> Future[_Result]:
        """Submit work for a project.

        Args:
            project: name of the project.
            work: called in a thread.
            subject: see the class.

        Returns:
            The future of its result. It may be cancelled while it waits, and is cancelled after a shutdown.
        """
        future: Future[_Result] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._waiting.setdefault(project, deque()).append(((project, subject), future, work))
            self._start()
        return future

    def shutdown(self) -> None:
        """Cancel waiting work, and wait for work in progress."""
        with self._lock:
            self._closed = True
            waiting = [future for works in self._waiting.values() for _, future, _ in works]
            self._waiting.clear()
        for future in waiting:
            future.cancel()
        self._pool.shutdown(wait=True)

    def _start(self) -> None:
        """Start as much work as threads and limits allow. The caller holds the lock."""
        while self._of_project.total() < self._threads and (item := self._next()) is not None:
            key, future, work = item
            self._of_project[key[0]] += 1
            self._of_subject[key] += 1
            self._pool.submit(functools.partial(self._run, key, future, work))

    def _next(self) -> tuple[_Key, Future[Any], Callable[[], Any]] | None:
        for project, waiting in self._waiting.items():
            if self._of_project[project] >= self._per_project:
                continue
            for index, item in enumerate(waiting):
                if self._of_subject[item[0]] < self._per_subject:
                    del waiting[index]
                    self._waiting.move_to_end(project)
                    if not waiting:
                        del self._waiting[project]
                    return item
        return None

    def _run(self, key: _Key, future: Future[_Result], work: Callable[[], _Result]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)
        finally:
            with self._lock:
                self._of_project -= Counter([key[0]])  # a difference drops zeros
                self._of_subject -= Counter([key])
                if key[0] in self._waiting:
                    self._waiting.move_to_end(key[0])  # it may have been added again during its turn
                if not self._closed:
                    self._start()
