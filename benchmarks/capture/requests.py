"""Requests to S3 and what they cost: counted on recordings of one node of runs of 1, 8, 64 and 1,000 ranks, in real time.

A node has eight ranks, of which one writes, as seldom as the number of nodes allows; so one node's requests times the
nodes are the run's. The first minute is denser than the rest, so both are counted, and an hour is one such minute and 59
of the rest::

    requests an hour = first minute + 59 * later minute
    dollars an hour = nodes * (0.005 * (PUT + LIST) + 0.0004 * GET) / 1000

A step comes every tenth of a second, so every flush has something to write: that is the dearest case. What the
service reads is not counted.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

from benchmarks.capture.counting_s3 import CountingS3, serve
from benchmarks.report import Figure, Report

_RANKS = (1, 8, 64, 1000)
_RANKS_OF_A_NODE = 8
_DOLLARS = {"PUT": 0.005 / 1000, "LIST": 0.005 / 1000, "GET": 0.0004 / 1000, "HEAD": 0.0004 / 1000}
"""S3 Standard, us-east-1, https://aws.amazon.com/s3/pricing/."""
_TARGET_AT_64 = 0.10
_FIRST_MINUTE = 80.0
"""And some seconds until all processes have started, so that nothing of it falls into what is counted as later."""
_LATER = 120.0
"""A multiple of the longest flush interval, 30 s, and of the others nearly."""
_QUICK = 10.0


def add_request_figures(report: Report, *, quick: bool) -> None:
    """Count for some minutes; `quick` counts ten seconds, which says nothing about an hour."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with serve([_bucket(ranks) for ranks in _RANKS]) as server, _recordings():
        if quick:
            time.sleep(_QUICK)
            _add_dense(report, server)
            return
        time.sleep(_FIRST_MINUTE)
        first = {ranks: server.of(_bucket(ranks)) for ranks in _RANKS}
        time.sleep(_LATER)
        for ranks in _RANKS:
            later = server.of(_bucket(ranks)) - first[ranks]
            _add_hour(report, ranks, first[ranks], later)


def _add_hour(report: Report, ranks: int, first: Counter[str], later: Counter[str]) -> None:
    per_minute = {kind: count * 60 / _LATER for kind, count in later.items()}
    hour = {kind: first[kind] + 59 * per_minute.get(kind, 0.0) for kind in sorted({*first, *per_minute})}
    nodes = _nodes(ranks)
    dollars = nodes * sum(_DOLLARS[kind] * count for kind, count in hour.items())
    told = ", ".join(f"{kind} {first[kind]} then {per_minute.get(kind, 0.0):g} a minute" for kind in hour)
    name = f"requests/{ranks}_ranks"
    report.add(f"{name}/requests", Figure(nodes * sum(hour.values()), "1/h", note=f"one node: {told}"))
    target = _TARGET_AT_64 if ranks == 64 else None
    report.add(f"{name}/dollars", Figure(dollars, "$/h", target))


def _add_dense(report: Report, server: CountingS3) -> None:
    for ranks in _RANKS:
        counted = server.of(_bucket(ranks))
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(counted.items()))
        figure = Figure(counted.total() / _QUICK, "1/s", note=f"one node, its first {_QUICK:g} s: {told}")
        report.add(f"requests/{ranks}_ranks/dense", figure)
    report.remark("requests: dollars an hour need the minutes after the first; run without --quick")


@contextlib.contextmanager
def _recordings() -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    processes: list[BaseProcess] = []
    attempt = f"a{secrets.token_hex(4)}"
    for ranks in _RANKS:
        for rank in range(ranks // _nodes(ranks)):
            processes.append(context.Process(target=_record, args=(ranks, rank, attempt, stop), daemon=True))
            processes[-1].start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(30)


def _record(ranks: int, rank: int, attempt: str, stop: multiprocessing.synchronize.Event) -> None:
    """One rank: a scalar each step."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks // _nodes(ranks)),
        "WATCHSTEP_RUN": "counted",
        "WATCHSTEP_ATTEMPT": attempt,
    }
    import watchstep

    with watchstep.Hook(f"s3://{_bucket(ranks)}/runs") as hook:
        while not stop.wait(0.1):
            hook.log(loss=1.0)
            hook.step()


def _nodes(ranks: int) -> int:
    return max(1, ranks // _RANKS_OF_A_NODE)


def _bucket(ranks: int) -> str:
    return f"ranks-{ranks}"
