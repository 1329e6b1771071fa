"""Projects whose evaluations take much time: their runs are evaluated after those of others.

A worker cannot be interrupted in an evaluation. A project with many runs of slow rules would keep all workers busy, each for
`Settings.rule_seconds`, one run after the other; so would one with many announcements of segments that do not exist. So the time that
evaluations take, beyond what is usual, defers the project's runs:
a run that is deferred by a minute is evaluated as if it had become due a minute later. Where no other project has
work, nothing changes.

Usual evaluations count, too, each second as one second, whether they are many or long: thousands of runs that become due at once would
keep the runs of other projects waiting until all of them were evaluated. A project that keeps less than one worker busy is
deferred by some seconds at most, and they defer a project by less than the time by which an urgent run comes first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import BigInteger, bindparam, case, update
from sqlalchemy.exc import SQLAlchemyError

from watchstep_rules.custom.sandbox.rule_time import limited_rule_time
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
