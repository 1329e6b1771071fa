"""What is done to the service, when, and how often it was: tokens at points, and blows from outside."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, and_, not_, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from benchmarks.crash import audit, clock
from benchmarks.crash.listener import KILL, PAUSE
from benchmarks.crash.parts import Parts
from benchmarks.crash.proxy import Proxy
from benchmarks.crash.servers import PostgresServer, RedisServer
from watchstep_services.core.failpoints import POINTS
from watchstep_services.db.clock import now_ns
from watchstep_services.db.models import ActionRow, RunRow

PAUSED_AT = ("evaluate.claimed", "evaluate.read", "evaluate.judged", "dispatch.sent")
"""Where a process is stopped until its lease is another's; from there it must write nothing."""

_NOT_KILLED_AT = ("evaluate.fenced",)  # nobody gets there but who was paused, and that one is killed there
_PATIENCE = 60.0
_GROWN = 2.0


@dataclass
class Done:
    """What was done.

    Attributes:
        kills: by what was killed: a point, ``api``, ``worker``, ``postgres`` and the like.
        others: connections cut, commits whose answer was lost, FLUSHALLs, clock jumps, pauses.
        wrote: of each process that was paused past its lease and wrote afterwards: what.
        fenced: how many found out that they had lost their lease.
    """

    kills: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    wrote: list[str] = field(default_factory=list)
    fenced: int = 0


class Faults:
    """Everything that can be done to the service. Blows come from one thread."""

    def __init__(self, folder: Path, postgres: PostgresServer, redis: RedisServer, seed: int) -> None:
        self.done = Done()
        self._folder = folder
        self._postgres, self._redis = postgres, redis
        self.to_postgres, self.to_redis = Proxy(postgres.port), Proxy(redis.port)
        self._chance = random.Random(seed)
        self._numbers = iter(range(1 << 30))
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self.parts: Parts | None = None
        (folder / "taken").mkdir()
        for point in POINTS:
            (folder / "points" / point).mkdir(parents=True)

    @property
    def at_points(self) -> dict[str, Callable[[], object]]:
        """What a process that has reached a point may ask for."""
        return {
            "cut_postgres": self._cut_postgres,
            "cut_redis": self._cut_redis,
            "swallow": self.to_postgres.swallow_a_commit,
            "postgres": self._kill_postgres,
            "redis": self._kill_redis,
            "flush": self._flush,
        }

    def lay(self, effect: str, point: str) -> None:
        """Lay a token: whoever next reaches the point takes it."""
        (self._folder / "points" / point / f"{effect}-{next(self._numbers)}").touch()

    def lay_some(self, kills: int, others: int, pauses: int) -> None:
        """Lay tokens until so many lie there: kills where least were killed, the others where chance has them.

        So many at a time and not more, or nothing would ever get beyond the points that are reached first.
        """
        points = [point for point in POINTS if point not in _NOT_KILLED_AT]
        lying = sorted((self._folder / "points").glob("*/*"))
        of_kills = [path.parent.name for path in lying if path.name.startswith(f"{KILL}-")]
        of_pauses = [path for path in lying if path.name.startswith(f"{PAUSE}-")]
        self._chance.shuffle(points)
        points.sort(key=lambda point: self.done.kills[point] + 2 * of_kills.count(point))
        for point in points[: max(0, kills - len(of_kills))]:
            self.lay(KILL, point)
        effects = list(self.at_points)
        for _ in range(others - (len(lying) - len(of_kills) - len(of_pauses))):
            self.lay(self._chance.choice(effects), self._chance.choice(points))
        for _ in range(pauses - len(of_pauses)):
            self.lay(PAUSE, self._chance.choice(PAUSED_AT))

    def clear(self) -> None:
        """Take back what nobody took."""
        for token in (self._folder / "points").glob("*/*"):
            token.unlink(missing_ok=True)

    def blow(self) -> None:
        """One blow from outside, by chance."""
        parts = self.parts
        assert parts is not None
        kind = self._chance.choices(
            (
                "child", "api", "worker", "worker alone", "scheduler", "redis", "postgres", "a backend of postgres",
                "cut", "cut redis", "swallow", "flush", "clock",
            ),
            (80, 4, 2, 2, 4, 6, 1, 1, 5, 4, 8, 4, 5),
        )[0]  # fmt: skip
        worker = self._chance.choice(("worker", "jumping-worker"))
        if kind == "child":
            self._kill_a_child(worker)
        elif kind in {"api", "scheduler"}:
            self._count(kind, parts.kill(kind, whole=True))
        elif kind.startswith("worker"):
            self._count(kind, parts.kill(worker, whole=kind == "worker"))
        elif kind == "redis":
            self._kill_redis()
        elif kind == "postgres":
            self._kill_postgres()
        elif kind == "a backend of postgres":
            self._count(kind, self._postgres.kill_a_child(self._chance.choice))
        elif kind == "cut":
            self._cut_postgres()
        elif kind == "cut redis":
            self._cut_redis()
        elif kind == "swallow":
            self.to_postgres.swallow_a_commit()
        elif kind == "flush":
            self._flush()
        else:
            clock.jump(self._folder, self._chance.choice(clock.JUMPS))
            self.done.others["clock jumps"] += 1

    def look(self, engine: Engine) -> None:
        """Count what was taken at points since the last look, and let those go on that were paused long enough."""
        for path in sorted((self._folder / "taken").glob("*.json")):
            if path.name in self._seen or path.name.endswith(".resumed.json"):
                continue
            taken = json.loads(path.read_text())
            if taken["effect"] == KILL:
                self.done.kills[taken["point"]] += 1
            elif taken["effect"] == PAUSE and not self._resumed(engine, path, taken):
                continue
            self._seen.add(path.name)

    def paused(self) -> list[str]:
        """What holds those that are still paused."""
        taken = [path.name for path in (self._folder / "taken").glob(f"{PAUSE}-*.json")]
        return [name for name in taken if name not in self._seen and not name.endswith(".resumed.json")]

    def _resumed(self, engine: Engine, path: Path, taken: dict[str, Any]) -> bool:
        """Let a paused process go on once another has its work; True when it is over."""
        resumed = path.with_name(f"{path.stem}.resumed.json")
        marked = path.with_suffix(".since")
        pid = int(taken["pid"])
        if resumed.exists():
            self._hold_to_account(engine, taken, marked)
            self.done.others["pauses past the lease"] += 1
            self.done.fenced += json.loads(resumed.read_text())["point"] in {
                "evaluate.fenced", "dispatch.recorded"
            }  # fmt: skip
            self.done.kills["after a pause"] += 1
            return True
        if not _exists(pid):
            self._hold_to_account(engine, taken, marked)
            self.done.others["killed while paused"] += 1
            return True
        if not marked.exists() and _wanted_by_nobody(engine, taken):
            os.kill(pid, signal.SIGKILL)
        elif not marked.exists() and _lost(engine, taken):
            marked.write_text(str(audit.clock(engine)))
            os.kill(pid, signal.SIGCONT)
        elif marked.exists() and time.time() - marked.stat().st_mtime > _PATIENCE:
            os.kill(pid, signal.SIGKILL)  # its work broke off where no point is
        return False

    def _hold_to_account(self, engine: Engine, taken: dict[str, Any], marked: Path) -> None:
        """Note what a process wrote of what was another's when it went on."""
        if marked.exists():
            wrote = audit.written_by(engine, taken, marked.read_text())
            self.done.wrote += [f"{taken} wrote: {what}" for what in wrote]

    def _kill_a_child(self, worker: str) -> None:
        assert self.parts is not None
        # A worker whose pool cannot be filled at its start gives up itself: those are left to be killed at points.
        found = [child for child in self.parts.children(worker) if _age(child) > _GROWN]
        if not found:
            return
        try:
            self._chance.choice(found).send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return
        self._count("a process of a worker", True)

    def _count(self, kind: str, happened: bool) -> None:
        self.done.kills[kind] += happened

    def _cut_postgres(self) -> None:
        self.done.others["connections to PostgreSQL cut"] += self.to_postgres.cut()

    def _cut_redis(self) -> None:
        self.done.others["connections to Redis cut"] += self.to_redis.cut()

    def _flush(self) -> None:
        with self._lock, self._redis.client() as client:
            client.flushall()
        self.done.others["FLUSHALL"] += 1

    def _kill_redis(self) -> None:
        with self._lock:
            self._redis.kill()
            self._count("redis", True)
            self._redis.start()

    def _kill_postgres(self) -> None:
        with self._lock:
            self._postgres.kill()
            self._count("postgres", True)
            self._postgres.start()


def _age(process: psutil.Process) -> float:
    try:
        if process.status() == psutil.STATUS_STOPPED:
            return 0.0  # paused: its time is still to come
        return time.time() - process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _exists(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:4]
    except OSError:
        return False


def _lost(engine: Engine, taken: dict[str, Any]) -> bool:
    """Whether what a process held is another's by now."""
    with Session(engine) as session:
        if "epoch" in taken:
            epoch = session.execute(select(RunRow.epoch).filter_by(id=taken["run_id"])).scalar_one()
            return epoch > int(taken["epoch"])
        claims, state = session.execute(
            select(ActionRow.claims, ActionRow.state).filter_by(id=taken["action_id"])
        ).one()
        return claims > int(taken["claims"]) or state != "pending"


def patiently(look: Callable[[], bool], seconds: float = _PATIENCE) -> bool:
    """Look again until something holds, through a database that is away now and then; False if it never did."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if look():
                return True
        except OperationalError:
            pass
        time.sleep(0.1)
    return False


def _wanted_by_nobody(engine: Engine, taken: dict[str, Any]) -> bool:
    """Whether nobody will take the run that a process held: it was asked for though it was not due, and its lease is over."""
    if "epoch" not in taken:
        return False
    with Session(engine) as session:
        due = and_(RunRow.due_ns.is_not(None), RunRow.due_ns <= now_ns())
        mine = RunRow.epoch == int(taken["epoch"])
        found = select(RunRow.id).where(
            RunRow.id == taken["run_id"], mine, RunRow.lease_until_ns <= now_ns(), not_(due)
        )
        return session.execute(found).one_or_none() is not None
