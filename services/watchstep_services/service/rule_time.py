"""Projects whose evaluations take much time: their runs are evaluated after those of others.

A worker cannot be interrupted in an evaluation. A project with many runs of slow rules would keep all workers busy, each for
`Settings.rule_seconds`, one run after the other; so would one with many announcements of segments that do not exist. So the time that
evaluations take, beyond what is usual, defers the project's runs:
a run that is deferred by a minute is evaluated as if it had become due a minute later. Where no other project has
work, nothing changes.

Usual evaluations count, too, each second as one second, whether they are many or long: thousands of runs that become due at once would
keep the runs of other projects waiting until all of them were evaluated. A project that keeps less than one worker busy is
deferred by some seconds at most, and they defer a project by less than the time by which an urgent run comes first.

Turns of large evaluations: one at a time in a process, and the projects that wait for it in turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import BigInteger, bindparam, case, update
from sqlalchemy.exc import SQLAlchemyError

from watchstep_rules.custom.sandbox.program import limited_rule_time
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import now_ns
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Project

FREE_SECONDS = 1.0
"""Of one evaluation: what rules that are written with care take, also over hundreds of steps."""

_OTHER_FREE_SECONDS = 2.0
_OTHER_SHARE = 0.5
"""Of reading and of built-in rules: both take longer where the store is slow, or a run has much to catch up with."""

_DEFERRED_BY = 20
"""Seconds for each second of rules: with two workers, a project's slow rules get about a tenth of their time while others wait."""

_now = time.monotonic
_log = logging.getLogger(__name__)

LONGEST_NS = 600 * NANOSECONDS
"""Longer than a run of which something sudden was said comes before others (`claim.AHEAD_NS`)."""

USUAL_LONGEST_NS = 120 * NANOSECONDS
"""Most by which usual evaluations defer a project; less than `claim.AHEAD_NS`, so that its urgent runs come first all the same."""

_NOTED_SECONDS = 1.0
"""Usual evaluations are charged once they add up to this: a statement for each would cost more than some evaluations."""


class UsualTime:
    """Seconds that this process's usual evaluations took, by project, and that are not charged yet. Thread-safe."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, project: str, seconds: float) -> float:
        """Add the time of one evaluation.

        Args:
            project: its name.
            seconds: of the evaluation.

        Returns:
            Seconds that are to be charged now; 0 until they are enough.
        """
        with self._lock:
            total = self._seconds[project] + seconds
            if total >= _NOTED_SECONDS:
                del self._seconds[project]
                return total
            self._seconds[project] = total
            return 0.0


@contextmanager
def charged(
    database: Database,
    project: str,
    rule_seconds: float,
    usual_time: UsualTime,
    absent_seconds: Callable[[], float] = lambda: 0.0,
) -> Iterator[None]:
    """In the ``with`` block an evaluation is prepared, and its project is charged with the time that it took.

    Args:
        database: the database.
        project: of the run.
        rule_seconds: how long its SQL and Python rules may take together.
        usual_time: of this process.
        absent_seconds: how long it has looked for segments that were announced and do not exist.
    """
    began = _now()
    with limited_rule_time(rule_seconds) as rule_time:
        try:
            yield
        finally:
            absent = absent_seconds()
            other = _now() - began - rule_time.spent - absent
            seconds = rule_time.spent + _OTHER_SHARE * max(0.0, other - _OTHER_FREE_SECONDS)
            usual = usual_time.add(project, max(0.0, other))
            try:
                charge(database, project, seconds, absent)
                if usual:
                    charge_usual(database, project, usual)
            except SQLAlchemyError as error:
                _log.warning("project %s: %.1f s of evaluation are not charged: %s", project, seconds, error)


def charge(database: Database, project: str, seconds: float, absent_seconds: float = 0.0) -> None:
    """Defer a project by the time that one of its evaluations took.

    Args:
        database: the database.
        project: its name.
        seconds: of rules and reading; up to `FREE_SECONDS` count nothing.
        absent_seconds: of looking for segments that do not exist, which count in full: many runs may each look for a few.
    """
    seconds = absent_seconds + (seconds if seconds > FREE_SECONDS else 0.0)
    if seconds <= 0:
        return
    with database.bare() as connection:
        connection.execute(
            _CHARGE,
            {"of": project, "by_ns": nanoseconds(seconds * _DEFERRED_BY), "longest_ns": LONGEST_NS},
        )


def charge_usual(database: Database, project: str, seconds: float) -> None:
    """Defer a project by the time that its usual evaluations took, up to `USUAL_LONGEST_NS` from now.

    Args:
        database: the database.
        project: its name.
        seconds: of its evaluations in this process since they were charged last.
    """
    with database.bare() as connection:
        connection.execute(
            _CHARGE, {"of": project, "by_ns": nanoseconds(seconds), "longest_ns": USUAL_LONGEST_NS}
        )


_START = case((Project.deferred_until_ns > now_ns(), Project.deferred_until_ns), else_=now_ns())
_END = _START + bindparam("by_ns", type_=BigInteger())
_MOST = now_ns() + bindparam("longest_ns", type_=BigInteger())
# A project that is deferred by longer already stays so.
_CHARGE = (
    update(Project)
    .where(Project.name == bindparam("of"))
    .values(deferred_until_ns=case((_END <= _MOST, _END), (_START > _MOST, _START), else_=_MOST))
    .execution_options(synchronize_session=False)
)


RETRY_SECONDS = 2.0
"""So long after it was postponed a run with a large evaluation is due again."""

_PATIENCE_SECONDS = 5 * RETRY_SECONDS
"""A project that has not asked again for so long waits no more: another worker has evaluated its run, or it was deleted."""

_MAX_WAITING = 1000
"""Projects whose last turn is remembered."""


class LargeTurn:
    """Which project's large evaluation may be judged and committed now. Thread-safe.

    Where several projects wait, the one whose last turn began longest ago is next, whichever asks first: a project with many large evaluations
    delays those of another by one evaluation.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: dict[str, float] = {}
        self._last_turns: OrderedDict[str, float] = OrderedDict()

    def take(self, project: str) -> bool:
        """Take the turn, if it is free and no other project comes first. Who does not get it asks again after `RETRY_SECONDS`.

        Args:
            project: of the run.

        Returns:
            Whether it is taken; then `release` is to be called.
        """
        with self._lock:
            now = time.monotonic()
            self._waiting = {
                name: asked for name, asked in self._waiting.items() if now - asked < _PATIENCE_SECONDS
            }
            own = self._last_turns.get(project, 0.0)
            others = (self._last_turns.get(name, 0.0) for name in self._waiting if name != project)
            if self._is_taken or any(other < own for other in others):
                self._waiting[project] = now
                return False
            self._is_taken = True
            self._waiting.pop(project, None)
            self._last_turns[project] = now
            self._last_turns.move_to_end(project)
            while len(self._last_turns) > _MAX_WAITING:
                self._last_turns.popitem(last=False)
            return True

    def release(self) -> None:
        """The evaluation is committed, or has failed."""
        with self._lock:
            self._is_taken = False
