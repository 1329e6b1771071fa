"""A campaign: trainings begin, are judged and stopped, while everything around them is killed; then all is counted."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from sqlalchemy.exc import OperationalError

from benchmarks.crash import audit
from benchmarks.crash.checks import Verdict, judge, read_books, unsettled
from benchmarks.crash.faults import Done, Faults, patiently
from benchmarks.crash.ground import Ground
from benchmarks.crash.parts import Parts
from benchmarks.crash.recorders import Recorders, Service, Training, end_processes
from benchmarks.crash.servers import PostgresServer, RedisServer
from benchmarks.crash.trainings import KINDS, Calm, rules
from tests.infra.compose import search_path
from tests.services.recording import PROJECT
from watchstep.store.store import Store
from watchstep_services.auth import create_token
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.schema import upgrade

_SETTINGS = {
    "WEBHOOK_SECONDS": "1",
    "SWEEP_SECONDS": "0.7",
    "LISTING_SECONDS": "0.4",
    "GRACE_SECONDS": "0.4",
    "RETRY_SECONDS": "0.2",
    "GAP_SECONDS": "36000",  # nothing here is lost on the store, and what is late there must not be given up
    "ALLOWED_LATENESS_SECONDS": "36000",
    "SILENT_SECONDS": "36000",
    "LOCAL_JOBS": "true",
    "ALLOWED_ADDRESSES": "loopback",
    "REQUESTS_PER_MINUTE": "0",
    "RECORDINGS_PER_MINUTE": "0",
    "FAILURES_PER_MINUTE": "0",
    "LOG_LEVEL": "WARNING",
    "MIGRATE": "never",  # the harness did, before its triggers
}
_BLOWS = 0.35


@dataclass(frozen=True)
class Wanted:
    """How much of it.

    Attributes:
        kills: go on until so many.
        seconds: but no longer than this, the settling at the end not counted.
        at_once: trainings that go on at a time.
        processes: of each of the two workers' pools.
        lying: tokens that wait at points.
        pause: seconds between two looks at them, of which some bring a blow from outside.
        lease: seconds that an evaluation may hold a run; more on a machine that does much else.
        patience: seconds in which all must be at rest once nothing is killed any more.
        seed: of what is killed, and when.
    """

    kills: int
    seconds: float
    at_once: int = 26
    processes: int = 3
    lying: int = 12
    pause: float = 0.3
    lease: float = 1.5
    patience: float = 240.0
    seed: int = 0


@dataclass
class Outcome:
    """What was done, and what came of it."""

    done: Done
    verdict: Verdict
    runs: int
    announced: int
    unheard: int
    seconds: float
    commits_swallowed: int
    deaths: dict[str, int]


class Campaign:
    """The service under fire. Use `running` to make one."""

    def __init__(
        self, database: Database, recorders: Recorders, faults: Faults, calm: Calm, ground: Ground
    ) -> None:
        self._database, self._recorders, self._faults = database, recorders, faults
        self._calm, self._ground = calm, ground
        self._kinds = itertools.cycle(KINDS)
        self._numbers = itertools.count()
        self._live: dict[str, Training] = {}
        self._beginning: set[Future[Training]] = set()

    def carry_out(self, wanted: Wanted) -> Outcome:
        """All of it.

        Raises:
            TimeoutError: the service does not even begin to work.
        """
        start = time.monotonic()
        firing, writing = threading.Event(), threading.Event()
        threads = [
            threading.Thread(target=self._fire, args=(firing, wanted), name="fire", daemon=True),
            threading.Thread(target=self._write, args=(writing,), name="write", daemon=True),
        ]
        for thread in threads:
            thread.start()
        with ThreadPoolExecutor(4) as pool:
            while time.monotonic() - start < wanted.seconds and self._kills() < wanted.kills:
                self._turn(pool, wanted.at_once)
            firing.set()
            threads[0].join()
            self._faults.clear()
            at_rest = patiently(lambda: self._drained(pool), wanted.patience)
            writing.set()
            threads[1].join()
        verdict = Verdict()
        if not at_rest:
            self._say_what_is_stuck(verdict)
        self._judge_all(verdict)
        assert self._faults.parts is not None
        return Outcome(
            self._faults.done,
            verdict,
            len({training.run for training in self._recorders.trainings}),
            self._recorders.announced,
            self._recorders.unheard,
            time.monotonic() - start,
            self._faults.to_postgres.swallowed,
            dict(self._faults.parts.deaths),
        )

    def _kills(self) -> int:
        return sum(self._faults.done.kills.values())

    def _turn(self, pool: ThreadPoolExecutor, at_once: int) -> None:
        while len(self._live) + len(self._beginning) < at_once:
            self._beginning.add(pool.submit(self._begin))
        with suppress(OperationalError):
            self._look(pool)
        time.sleep(0.05)

    def _begin(self) -> Training:
        kind = next(self._kinds)
        run = f"r{next(self._numbers):05d}-{kind.name}"
        return self._recorders.begin(run, kind, first_try=kind.crashes_first)

    def _look(self, pool: ThreadPoolExecutor) -> None:
        """Take note of what was killed, and of trainings that have begun or are at rest."""
        self._faults.look(self._database.engine)
        for future in [future for future in self._beginning if future.done()]:
            self._beginning.discard(future)
            training = future.result()
            self._live[training.run] = training
        for run, training in list(self._live.items()):
            if not training.over:
                continue
            if training.first_try:
                del self._live[run]
                self._beginning.add(pool.submit(self._recorders.begin, run, training.kind, attempt="a2"))
            elif not unsettled(read_books(self._database, run), training):
                del self._live[run]

    def _drained(self, pool: ThreadPoolExecutor) -> bool:
        self._look(pool)
        return not self._live and not self._beginning and not self._faults.paused()

    def _write(self, ending: threading.Event) -> None:
        """Recorders write at a pace at which a training lasts a few seconds."""
        with ThreadPoolExecutor(4) as pool:
            while not ending.is_set():
                began = time.monotonic()
                list(pool.map(self._recorders.advance, list(self._live.values())))
                ending.wait(max(0.05, 0.6 - (time.monotonic() - began)))

    def _fire(self, ending: threading.Event, wanted: Wanted) -> None:
        chance = random.Random(wanted.seed)
        while not ending.is_set():
            self._faults.lay_some(kills=wanted.lying, others=2, pauses=1)
            if ending.wait(wanted.pause * chance.uniform(0.3, 1.7)):
                break
            if chance.random() < _BLOWS:
                self._faults.blow()

    def _judge_all(self, verdict: Verdict) -> None:
        for training in self._recorders.trainings:
            books = read_books(self._database, training.run)
            if books is None:
                verdict.add("runs that nobody knows", training.run)
                continue
            judge(verdict, self._database, books, training, self._calm, self._ground)
            newest = [held for held in self._recorders.trainings if held.run == training.run][-1]
            if reason := unsettled(books, newest):
                kind = "outbox actions left pending" if "pending" in reason else "states stuck"
                kind = "leases left stuck" if "leased" in reason else kind
                verdict.add(kind, f"{training.run}/{training.attempt}: {reason}")

    def _say_what_is_stuck(self, verdict: Verdict) -> None:
        waits = [*self._live, *self._faults.paused()]
        waits += [f"{len(self._beginning)} that never began"] if self._beginning else []
        verdict.add("states stuck", f"not at rest in time: {', '.join(waits)}")


@contextmanager
def running(folder: Path, wanted: Wanted) -> Iterator[Campaign]:
    """The service in production's processes, with everything that will be done to it."""
    with ExitStack() as stack:
        (folder / "postgres").mkdir()
        (folder / "redis").mkdir()
        postgres, redis = PostgresServer(folder / "postgres"), RedisServer(folder / "redis")
        for server in (postgres, redis):
            server.start()
            stack.callback(server.kill)
        faults = Faults(folder, postgres, redis, wanted.seed)
        for proxy in (faults.to_postgres, faults.to_redis):
            proxy.start()
            stack.callback(proxy.close)
        ground = Ground(faults.at_points)
        stack.callback(ground.close)
        database = open_database(postgres.url)
        stack.callback(database.close)
        upgrade(database)
        audit.install(database.engine)
        store = Store.open(folder / "store", create=True)
        judged_by = rules(f"{ground.url}/told")
        parts = Parts(
            folder,
            ground.url,
            {
                **_environment(folder, faults, postgres, judged_by),
                "WATCHSTEP_LEASE_SECONDS": str(wanted.lease),
            },
            wanted.processes,
        )
        faults.parts = parts
        stack.callback(parts.close)
        service = Service(
            parts.url, create_token(database, "recorder", PROJECT), create_token(database, "operator")
        )
        recorders = Recorders(store, ground, service, random.Random(wanted.seed), folder / "jobs")
        stack.callback(lambda: end_processes(recorders.trainings))
        parts.start()
        recorders.make_project(database)
        yield Campaign(database, recorders, faults, Calm(judged_by), ground)


def _environment(folder: Path, faults: Faults, postgres: PostgresServer, judged_by: tuple) -> dict[str, str]:  # type: ignore[type-arg]
    rules_file = folder / "rules.yaml"
    rules_file.write_text(yaml.safe_dump({"rules": [config.as_data() for config in judged_by]}))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("WATCHSTEP_")},
        "PATH": search_path(),
        "PYTHONUNBUFFERED": "1",
        "WATCHSTEP_STORE": str(folder / "store"),
        "WATCHSTEP_DATABASE_URL": postgres.url_at(faults.to_postgres.port),
        "WATCHSTEP_BROKER_URL": f"redis://127.0.0.1:{faults.to_redis.port}/0",
        "WATCHSTEP_RULES_FILE": str(rules_file),
        "WATCHSTEP_JOBS": str(folder / "jobs"),
        **{f"WATCHSTEP_{name}": value for name, value in _SETTINGS.items()},
    }
