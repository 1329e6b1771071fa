"""Threads that projects share: none that hangs keeps those of another from its turn."""

from __future__ import annotations

import functools
import threading
from collections import Counter

import pytest

from watchstep_services.core.fair_threads import FairThreads


def test_a_project_and_a_subject_have_so_many_threads_at_the_most() -> None:
    threads, go, lock = FairThreads(8, "test", 4, 2), threading.Event(), threading.Lock()
    running: Counter[tuple[str, str]] = Counter()
    most: Counter[str] = Counter()
    order: list[str] = []
    done = threading.Semaphore(0)

    def work(project: str, subject: str) -> None:
        with lock:
            running[project, subject] += 1
            order.append(project)
            most[subject] = max(most[subject], running[project, subject])
            of = sum(count for one, count in running.items() if one[0] == project)
            most[project] = max(most[project], of)
        assert go.wait(60)
        with lock:
            running[project, subject] -= 1
        done.release()

    wanted = [("a", f"a{number % 3}") for number in range(30)] + [("b", "b0") for _ in range(6)]
    for project, subject in wanted:
        threads.submit(project, functools.partial(work, project, subject), subject)
    go.set()
    for _ in wanted:
        assert done.acquire(timeout=60)
    threads.shutdown()
    assert (most["a"] <= 4, most["b"] <= 4) == (True, True)
    assert max(most["a0"], most["a1"], most["a2"], most["b0"]) <= 2
    assert "b" in order[:8], "its turn comes before the others of a project that was first"
    assert threads.submit("a", lambda: order.append("late")).cancelled()
    assert order[-1] != "late"


def test_what_work_comes_to_is_given_and_what_waits_can_be_cancelled() -> None:
    threads, go = FairThreads(2, "test", 1), threading.Event()

    def fails() -> None:
        raise ValueError("why")

    first = threads.submit("a", lambda: go.wait(60))
    waiting, failing = threads.submit("a", list[int]), threads.submit("a", fails)
    assert threads.submit("b", lambda: 7).result(60) == 7
    assert waiting.cancel()
    go.set()
    assert first.result(60)
    with pytest.raises(ValueError, match="why"):
        failing.result(60)
    threads.shutdown()
