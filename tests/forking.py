"""Worker processes for tests: pytest collects once and forks, and each worker runs whole files, whose tests share their servers.

pytest-xdist starts workers that each import and collect all tests again, which took a fifth of the processor time of the first tier.

    pytest -p tests.forking --workers 3
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of workers."""
    parser.addoption("--workers", type=int, default=0, help="processes that run tests; 0: this one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in workers."""
    workers = session.config.getoption("workers")
    if not workers or session.config.option.collectonly or session.testsfailed:
        return None
    Workers(session).run(workers)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


@dataclass
class _Worker:
    """A worker, and what it has.

    Attributes:
        tests: positions of its tests that have not ended, in order.
    """

    number: int
    pid: int
    link: connection.Connection
    tests: list[int]


class Workers:
    """Runs the tests of a session in forked processes, each of which asks for a file before it ends the last test of another."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._waiting = [
            [number for number, _ in tests]
            for _, tests in itertools.groupby(enumerate(session.items), lambda each: each[1].path)
        ]
        self._waiting.reverse()
        self._running: list[_Worker] = []
        self._numbers = itertools.count()
        # Otherwise each worker would print what was captured before it began.
        capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
        capture.read_global_capture()
        # The modules of all tests stay as long as the process; a collector that visits them delays each worker.
        gc.collect()
        gc.freeze()

    def run(self, workers: int) -> None:
        """Run all tests in so many workers."""
        try:
            for _ in range(min(workers, len(self._waiting))):
                self._start()
            while self._running:
                for link in connection.wait([worker.link for worker in self._running]):
                    self._receive(next(worker for worker in self._running if worker.link is link))
        finally:
            gc.unfreeze()
            for worker in self._running:  # where the session is interrupted
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)

    def _receive(self, worker: _Worker) -> None:
        try:
            kind, value = worker.link.recv()
        except (EOFError, ConnectionResetError):
            self._ended(worker)
            return
        if kind == "next":
            tests = self._take()
            worker.tests += tests
            worker.link.send(tests)
        elif kind == "ended":
            worker.tests.remove(value)
        else:
            self._report(value)

    def _take(self) -> list[int]:
        stopping = self._session.shouldfail or self._session.shouldstop
        return self._waiting.pop() if self._waiting and not stopping else []

    def _start(self) -> None:
        tests = self._take()
        number = next(self._numbers)
        ours, theirs = Pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            for other in self._running:
                other.link.close()
            ours.close()
            code = 1
            try:
                _work(self._session, number, theirs, tests)
                code = 0
            finally:
                # What other modules registered for the end of the process belongs to the first one.
                sys.stderr.flush()
                os._exit(code)
        theirs.close()
        self._running.append(_Worker(number, pid, ours, tests))

    def _ended(self, worker: _Worker) -> None:
        self._running.remove(worker)
        worker.link.close()
        _, status = os.waitpid(worker.pid, 0)
        if not worker.tests:
            return
        crashed, *rest = worker.tests
        code = os.waitstatus_to_exitcode(status)
        item = self._session.items[crashed]
        self._report_crash(item, f"worker {worker.number} crashed while running {item.nodeid}, code {code}")
        if rest:
            self._waiting.append(rest)
        if self._waiting:
            self._start()

    def _report(self, data: dict[str, Any]) -> None:
        hook = self._session.config.hook
        hook.pytest_runtest_logreport(
            report=hook.pytest_report_from_serializable(config=self._session.config, data=data)
        )

    def _report_crash(self, item: pytest.Item, text: str) -> None:
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", text, "call", user_properties=[("nodeid", item.nodeid)]
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)


def _work(session: pytest.Session, number: int, link: connection.Connection, tests: list[int]) -> None:
    """Run tests until there are no more. The body of a worker."""
    config = session.config
    _set_apart(config, number)
    config.pluginmanager.register(_Reports(config, link))
    following = _tests(link, tests)
    test = next(following, None)
    while test is not None:
        # The answer is awaited before the test runs: its teardown ends what the next one does not share.
        after = next(following, None)
        item = session.items[test]
        item.ihook.pytest_runtest_protocol(
            item=item, nextitem=None if after is None else session.items[after]
        )
        link.send(("ended", test))
        test = after


def _tests(link: connection.Connection, tests: list[int]) -> Iterator[int]:
    while tests:
        yield from tests
        link.send(("next", None))
        tests = link.recv()


def _set_apart(config: pytest.Config, number: int) -> None:
    """Give a worker its own output capture and folders."""
    plugins = config.pluginmanager
    for name in ("terminalreporter", "junitxml"):
        plugin = plugins.get_plugin(name)
        if plugin is not None and plugins.is_registered(plugin):
            plugins.unregister(plugin)
    for plugin in [each for each in plugins.get_plugins() if type(each).__name__ == "LogXML"]:
        plugins.unregister(plugin)
    # The file of captured output has one position for all processes that inherit it.
    capture: Any = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.mktemp(f"worker-{number}", numbered=False)
    factory._next_number.clear()


class _Reports:
    """Sends a worker's reports."""

    def __init__(self, config: pytest.Config, link: connection.Connection) -> None:
        self._config = config
        self._link = link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))
