"""Fairness of evaluation time: runs of projects with expensive evaluations are evaluated after those of other projects.

An evaluation cannot be interrupted. A project with many runs of slow rules would occupy all workers, each for
`Settings.rule_seconds`, one run after the other; so would one with many announcements of segments that do not exist. So the time that
evaluations take, beyond what is usual, defers the project's runs:
a run that is deferred by a minute is evaluated as if it had become due a minute later, and a minute ago at the earliest. If no other
project has work, nothing changes.

Usual evaluations count, too, each second as one second, whether they are many or long: thousands of runs that become due at once would
otherwise delay the runs of other projects until all of them were evaluated. A project that occupies less than one worker is
deferred by a few seconds at most. Usual evaluations defer a project by less than the priority of an urgent run. Each evaluation of an
urgent run defers it by some seconds more, because any recorder may report urgency, for any number of runs.

Large evaluations take turns: one at a time of a project, two in a process, and alternating between projects. The runs of one project occupy
all threads of a process but one (`EvaluationThreads`), so that its first slow evaluations, before any deferral, delay no other project.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from sqlalchemy import BigInteger, bindparam, case, update
from sqlalchemy.exc import SQLAlchemyError

from watchstep_rules.custom.sandbox.program import limited_rule_time
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import now_ns
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Project

FREE_SECONDS = 1.0
"""Seconds of one evaluation that are not charged: what efficient rules take, even over hundreds of steps."""

_OTHER_FREE_SECONDS = 2.0
_OTHER_SHARE = 0.5
"""The same for reading and built-in rules, which take longer if the store is slow or a run has a backlog; half of the rest is charged."""

_DEFERRED_BY = 20
"""Seconds of deferral for each second of rules: with two workers, a project's slow rules get about a tenth of their time under load."""

_now = time.monotonic
_log = logging.getLogger(__name__)

LONGEST_NS = 600 * NANOSECONDS
"""Longest deferral; longer than the priority of a run with a sudden failure (`claim.AHEAD_NS`)."""

USUAL_LONGEST_NS = 120 * NANOSECONDS
"""Longest deferral by usual evaluations; shorter than `claim.AHEAD_NS`, so that the project's urgent runs are still prioritized."""

_URGENT_SECONDS = 20.0
"""Deferral for each evaluation of an urgent run: about fifteen in five minutes use up the priority."""

_NOTED_SECONDS = 1.0
"""Usual evaluations are charged once they add up to this, because a statement for each would cost more than some evaluations."""


class UsualTime:
    """Seconds of this process's usual evaluations that are not charged yet, by project. Thread-safe."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, project: str, seconds: float) -> float:
        """Add the time of one evaluation.

        Args:
            project: name of the project.
            seconds: time of the evaluation.

        Returns:
            Seconds to charge now; 0 until they add up to `_NOTED_SECONDS`.
        """
        with self._lock:
            total = self._seconds[project] + seconds
            if total >= _NOTED_SECONDS:
                del self._seconds[project]
                return total
            self._seconds[project] = total
            return 0.0


BATCH_SECONDS = 0.1
"""Time that the runs of a batch take together: for as long, a run that becomes urgent waits for its worker."""

MOST_RUNS = 8
"""Limit of the runs of a batch. More save little: the statements of eight cost a tenth of their evaluations."""

_WEIGHT = 0.2


class RunBatchSize:
    """How many runs this process claims together, from the time that its evaluations take. Thread-safe."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lock = threading.Lock()

    @property
    def runs(self) -> int:
        """Number of runs that take `BATCH_SECONDS`, from 1 to `MOST_RUNS`."""
        with self._lock:
            return max(1, min(MOST_RUNS, int(BATCH_SECONDS / max(self._seconds, BATCH_SECONDS / MOST_RUNS))))

    def note(self, runs: int, seconds: float) -> None:
        """Take in the duration of a batch."""
        with self._lock:
            self._seconds += _WEIGHT * (seconds / runs - self._seconds)


class _OfProject(Protocol):
    """A claim."""

    @property
    def project(self) -> str:
        """Name of the run's project."""


_Claim = TypeVar("_Claim", bound=_OfProject)


class EvaluationThreads:
    """Limits the threads of this process that evaluate runs of one project. Thread-safe.

    Args:
        per_project: limit of threads for one project.
    """

    def __init__(self, per_project: int = sys.maxsize) -> None:
        self._per_project = per_project
        self._of_project: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def evaluating(self, claim: Callable[[list[str]], list[_Claim]]) -> Iterator[tuple[list[_Claim], bool]]:
        """Context of a thread that claims runs and evaluates them.

        Args:
            claim: claims runs, except those of the given projects, whose threads are all in use.

        Yields:
            The claims, and whether runs of any project were excepted.
        """
        # Within the lock, so that threads which claim at the same time do not exceed the limit together.
        with self._lock:
            full = [name for name, threads in self._of_project.items() if threads >= self._per_project]
            claims = claim(full)
            projects = Counter({entry.project for entry in claims})
            self._of_project += projects
        try:
            yield claims, bool(full)
        finally:
            with self._lock:
                self._of_project -= projects  # a difference drops zeros


@contextmanager
def charged(
    database: Database,
    project: str,
    rule_seconds: float,
    usual_time: UsualTime,
    absent_seconds: Callable[[], float] = lambda: 0.0,
    *,
    is_urgent: bool = False,
) -> Iterator[None]:
    """Context of an evaluation: limits the time of its rules, and charges its time to its project.

    Args:
        database: the database.
        project: name of the project.
        rule_seconds: limit of its SQL and Python rules together.
        usual_time: the process's uncharged usual time.
        absent_seconds: returns the time of look-ups of announced segments that do not exist.
        is_urgent: the run was prioritized.
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
                charge(database, project, seconds, absent, _URGENT_SECONDS if is_urgent else 0.0)
                if usual:
                    charge_usual(database, project, usual)
            except SQLAlchemyError as error:
                _log.warning("project %s: %.1f s of evaluation are not charged: %s", project, seconds, error)


def charge(
    database: Database,
    project: str,
    seconds: float,
    absent_seconds: float = 0.0,
    more_seconds: float = 0.0,
) -> None:
    """Defer a project by the time of one of its evaluations.

    Args:
        database: the database.
        project: name of the project.
        seconds: time of rules and reading; up to `FREE_SECONDS` are not charged.
        absent_seconds: time of look-ups of absent segments, charged in full because many runs may cause a few each.
        more_seconds: further seconds of deferral.
    """
    seconds = absent_seconds + (seconds if seconds > FREE_SECONDS else 0.0)
    deferral = seconds * _DEFERRED_BY + more_seconds
    if deferral <= 0:
        return
    with database.bare() as connection:
        connection.execute(_CHARGE, {"of": project, "by_ns": nanoseconds(deferral), "longest_ns": LONGEST_NS})


def charge_usual(database: Database, project: str, seconds: float) -> None:
    """Defer a project by the time of its usual evaluations, up to `USUAL_LONGEST_NS` from now.

    Args:
        database: the database.
        project: name of the project.
        seconds: time of its evaluations in this process since the last charge.
    """
    with database.bare() as connection:
        connection.execute(
            _CHARGE, {"of": project, "by_ns": nanoseconds(seconds), "longest_ns": USUAL_LONGEST_NS}
        )


_START = case((Project.deferred_until_ns > now_ns(), Project.deferred_until_ns), else_=now_ns())
_END = _START + bindparam("by_ns", type_=BigInteger())
_MOST = now_ns() + bindparam("longest_ns", type_=BigInteger())
# A longer deferral is not shortened.
_CHARGE = (
    update(Project)
    .where(Project.name == bindparam("of"))
    .values(deferred_until_ns=case((_END <= _MOST, _END), (_START > _MOST, _START), else_=_MOST))
    .execution_options(synchronize_session=False)
)


RETRY_SECONDS = 2.0
"""Time after which a postponed run with a large evaluation is due again."""

_WAITING_SECONDS = 5 * RETRY_SECONDS
"""A project that has not tried again for so long no longer waits: another worker has evaluated its run, or it was deleted."""

_MAX_WAITING = 1000
"""Limit of projects with a recorded last turn."""

_MOST_LARGE = 2
"""Limit of large evaluations at a time, of different projects, so that one project does not make the others wait."""


class LargeTurn:
    """Limits a process to one large evaluation of a project at a time, and to two in all, fairly by project. Thread-safe.

    If several projects wait, the one with the oldest last turn is next, whichever tries first. A project with many large evaluations
    does not delay those of another project, unless a third one has the other turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken_by: set[str] = set()
        self._waiting: dict[str, float] = {}
        self._last_turns: OrderedDict[str, float] = OrderedDict()

    def take(self, project: str) -> bool:
        """Take a turn, if one is free and no other project is next. Otherwise the caller tries again after `RETRY_SECONDS`.

        Args:
            project: name of the project.

        Returns:
            Whether the project has a turn now; if so, `release` must be called.
        """
        with self._lock:
            now = time.monotonic()
            self._waiting = {
                name: tried for name, tried in self._waiting.items() if now - tried < _WAITING_SECONDS
            }
            own = self._last_turns.get(project, 0.0)
            # A project that has a turn is not next.
            others = self._waiting.keys() - self._taken_by - {project}
            is_next = all(self._last_turns.get(name, 0.0) >= own for name in others)
            if project in self._taken_by or len(self._taken_by) >= _MOST_LARGE or not is_next:
                self._waiting[project] = now
                return False
            self._taken_by.add(project)
            self._waiting.pop(project, None)
            self._last_turns[project] = now
            self._last_turns.move_to_end(project)
            while len(self._last_turns) > _MAX_WAITING:
                self._last_turns.popitem(last=False)
            return True

    def release(self, project: str) -> None:
        """Release the turn of a project, after the evaluation was committed or has failed."""
        with self._lock:
            self._taken_by.discard(project)
            # It was refused while it had this turn. If another process has evaluated the refused run, it does not try again.
            self._waiting.pop(project, None)
