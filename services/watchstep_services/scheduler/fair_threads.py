"""Threads for what goes out to receivers, shared fairly: none that does not answer delays another project's by more than one turn."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from watchstep_services.dispatcher.outbox import Post

Work = Callable[[], None]


class FairThreads:
    """Does the oldest work of each project in turn. Thread-safe.

    Half of the threads are the most that one project has at a time, and a quarter the most for one of its receivers.

    Args:
        threads: that work at once.
        name: that they have in what debuggers show.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._per_project = max(1, threads // 2)
        self._per_receiver = max(1, threads // 4)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Post, Work]]] = OrderedDict()
        self._of_project: Counter[str] = Counter()
        self._of_receiver: Counter[Post] = Counter()
        self._closed = False

    def submit(self, post: Post, work: Work) -> None:
        """Have something done for a project and a receiver; work raises nothing. Nothing happens once it is shut down."""
        with self._lock:
            if self._closed:
                return
            self._waiting.setdefault(post.project, deque()).append((post, work))
            self._start()

    def shutdown(self) -> None:
        """Leave what waits undone, and end what is being done."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self._pool.shutdown(wait=True)

    def _start(self) -> None:
        """Begin as much as threads and limits allow. The lock is held."""
        while self._of_project.total() < self._threads and (found := self._next()) is not None:
            post, work = found
            self._of_project[post.project] += 1
            self._of_receiver[post] += 1
            self._pool.submit(self._run, post, work)

    def _next(self) -> tuple[Post, Work] | None:
        for project, waiting in self._waiting.items():
            if self._of_project[project] >= self._per_project:
                continue
            for place, (post, work) in enumerate(waiting):
                if self._of_receiver[post] < self._per_receiver:
                    del waiting[place]
                    self._waiting.move_to_end(project)
                    if not waiting:
                        del self._waiting[project]
                    return post, work
        return None

    def _run(self, post: Post, work: Work) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._of_project -= Counter([post.project])  # a difference keeps no zeros
                self._of_receiver -= Counter([post])
                if not self._closed:
                    self._start()
