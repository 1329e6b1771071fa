"""Backtests of several projects take turns in the one thread of an embedded service."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.services.driving import RULES, Driven
from watchstep_services.evaluation.backtests import request_backtest
from watchstep_services.runs.registration import register
from watchstep_services.scheduler import queue
from watchstep_services.scheduler.queue import WorkQueue
from watchstep_services.service.context import Service


def test_a_project_with_many_backtests_delays_that_of_another_by_one_run(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = driven_sqlite.service
    for project in ("many", "other"):
        register(service, project, "run-1", (), "operator")
    judged: list[int] = []
    release, begun, done = threading.Event(), threading.Event(), threading.Event()
    turns = 8

    def judge(_service: Service, number: int) -> None:
        begun.set()
        assert release.wait(60)
        judged.append(number)
        if len(judged) == turns:
            done.set()

    monkeypatch.setitem(queue._WORK, "backtest", judge)
    work = WorkQueue(1)
    work.start(service)
    asking = replace(service, notifier=work)
    try:
        many = [request_backtest(asking, "many", ["run-1"], RULES, []) for _ in range(turns - 1)]
        assert begun.wait(60)
        other = request_backtest(asking, "other", ["run-1"], RULES, [])
        release.set()
        assert done.wait(60)
    finally:
        release.set()
        work.close()
    assert judged[:2] == [many[0], other]
