"""References of an attempt: other runs, and earlier attempts, that its rules compare with, pinned when its first rows are evaluated.

Pinning reads whole runs, and a recorder may have written the object itself, with the largest contents that are allowed. So references
are pinned and read within the turn for large evaluations, once for each attempt and process; what was read, or why it could not be, is cached.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from sqlalchemy import func, select

from watchstep.errors import NotFoundError, StoreError
from watchstep.format.layout import check_name
from watchstep.store.store import Store
from watchstep_rules.references import (
    MAX_POINTS,
    JudgedAttempt,
    PinnedReferences,
    compared_by,
    pin_references,
    readable_references,
    with_references,
)
from watchstep_rules.signals.reference import OWN_RUN
from watchstep_services.db.engine import is_of_all
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.service.caches import RuleStateCache
from watchstep_services.service.context import Service
from watchstep_services.service.judging import Judged, Loaded

_ATTEMPTS = 4096

_MOST_EARLIER = 16
"""Number of earlier attempts beyond which one that begins at step 0 is not compared with them: a process that trains often, as in a search."""

_log = logging.getLogger(__name__)


class ReferenceCache:
    """References of the attempts that this process evaluated last; what is invalid is cached as well. Thread-safe.

    Args:
        points: limit of the points of all attempts, about 140 bytes each; beyond it the least recently used are dropped.
    """

    def __init__(self, points: int = MAX_POINTS) -> None:
        self._most = points
        self._points = 0
        self._entries: OrderedDict[tuple[str, str], PinnedReferences] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, attempt: tuple[str, str]) -> PinnedReferences | None:
        """The references of an attempt (location of the run, attempt); None if they are not cached."""
        with self._lock:
            if attempt in self._entries:
                self._entries.move_to_end(attempt)
            return self._entries.get(attempt)

    def put(self, attempt: tuple[str, str], references: PinnedReferences) -> None:
        """Cache the references of an attempt."""
        with self._lock:
            before = self._entries.pop(attempt, None)
            self._points += references.points - (before.points if before else 0)
            self._entries[attempt] = references
            while len(self._entries) > 1 and (self._points > self._most or len(self._entries) > _ATTEMPTS):
                _, dropped = self._entries.popitem(last=False)
                self._points -= dropped.points


_caches: WeakKeyDictionary[RuleStateCache, ReferenceCache] = WeakKeyDictionary()
_caches_lock = threading.Lock()


def _cache_of(service: Service) -> ReferenceCache:
    """The cache of a process's service, which lives as long as its other caches."""
    with _caches_lock:
        return _caches.setdefault(service.rule_states, ReferenceCache())


@dataclass(frozen=True)
class ComparedConfigs:
    """Rule configs, those that compare runs with the statistics of the other runs; and the references, None if no config compares runs."""

    configs: list[Loaded]
    references: PinnedReferences | None

    def without_statistics(self, judged: Sequence[Judged], configs: Sequence[Loaded]) -> list[Judged]:
        """Results with the original rule configs: with statistics, a config is large, and is not the one that a grant of a stop names.

        Args:
            judged: the results, one for each config.
            configs: the original configs.
        """
        if self.references is None:
            return list(judged)
        return [replace(entry, config=loaded.config) for entry, loaded in zip(judged, configs, strict=True)]


class AttemptReferences:
    """The references of one attempt.

    Args:
        service: the service.
        run_store: the store of the run.
        project: its project.
        attempt: the attempt.
    """

    def __init__(self, service: Service, run_store: Store, project: str, attempt: Attempt) -> None:
        self._service, self._store, self._project, self._attempt = service, run_store, project, attempt

    def add(
        self, configs: Sequence[Loaded], *, first_step: int | None, take_turn: Callable[[], bool]
    ) -> ComparedConfigs | None:
        """Add the statistics of reference runs to the rule configs that compare with them.

        Args:
            configs: the rule configs of the run.
            first_step: the first step of an attempt that begins, so that its references are pinned; None for one that has begun. If the
                store is read-only, rules are evaluated without references, which they report in their health.
            take_turn: takes the turn for large evaluations, unless this evaluation has it; returns whether it has it.

        Returns:
            None if the references have to be pinned or read, and the turn is taken.

        Raises:
            StoreError: the store did not answer.
            StoppingError: the process ends.
        """
        runs = [
            entry.run
            for loaded in configs
            if loaded.config is not None and (entry := compared_by(loaded.config))
        ]
        if not runs or (first_step is None and self._attempt.largest < 0):  # no rows yet
            return ComparedConfigs(list(configs), None)
        cache, key = _cache_of(self._service), (self._store.location, self._attempt.attempt)
        references = cache.get(key)
        if references is None:
            earlier = self._earlier() if OWN_RUN in runs else []
            if set(runs) == {OWN_RUN} and not earlier:
                references = PinnedReferences()  # the first attempt; this needs no turn
            elif not take_turn():
                return None
            else:
                references = self._read(configs, runs, earlier, first_step)
            cache.put(key, references)
        added = [
            loaded
            if loaded.config is None
            else replace(loaded, config=with_references([loaded.config], references)[0])
            for loaded in configs
        ]
        return ComparedConfigs(added, references)

    def _earlier(self) -> list[str]:
        """The attempts of the run with rows that began before this one, in their order."""
        began = func.coalesce(func.nullif(Attempt.started_ns, 0), Attempt.first_seen_ns)
        own = self._attempt.started_ns or self._attempt.first_seen_ns
        with self._service.database.read() as session:
            found = session.scalars(
                select(Attempt.attempt)
                .where(
                    Attempt.run_id == self._attempt.run_id,
                    Attempt.attempt != self._attempt.attempt,
                    Attempt.largest >= 0,
                    began <= own,
                )
                .order_by(began, Attempt.attempt)
            )
            return list(found)

    def _read(
        self, configs: Sequence[Loaded], runs: Sequence[str], earlier: Sequence[str], first_step: int | None
    ) -> PinnedReferences:
        """Read the references; pin them first if the attempt begins and none were pinned."""
        references = readable_references(self._store, self._attempt.attempt)
        if references is None and first_step is not None:
            self._pin(configs, runs, earlier, first_step)
            references = readable_references(self._store, self._attempt.attempt)
        if references is not None and references.damage:
            self._log(references.damage)
        return references or PinnedReferences()

    def _pin(
        self, configs: Sequence[Loaded], runs: Sequence[str], earlier: Sequence[str], first_step: int
    ) -> None:
        with self._service.database.read() as session:
            rows = session.execute(
                select(RunRow.run, RunRow.attempt).where(
                    RunRow.project == self._project, RunRow.run.in_(runs), RunRow.attempt != ""
                )
            ).all()
        readable = [loaded.config for loaded in configs if loaded.config is not None]
        attempts = {str(row.run): str(row.attempt) for row in rows}
        if earlier and (first_step or len(earlier) <= _MOST_EARLIER):
            attempts[OWN_RUN] = earlier[-1]
        try:
            pin_references(
                JudgedAttempt(self._store, self._attempt.attempt, first_step),
                readable,
                attempts,
                self._service.check_running,
                self.store_of,
            )
        except StoreError as error:
            self._log(error.what)
        except Exception as error:
            if is_of_all(error):
                raise
            # An internal error with a reference run; the rules without one are evaluated.
            _log.exception("project %s: the reference runs of an attempt cannot be read", self._project)

    def store_of(self, run: str) -> Store:
        """The store of a run of the project, which may be another one than that of the judged run.

        Raises:
            BadNameError: the name is not valid.
            NotFoundError: the run does not exist.
            ConfigError, StoreError: the store cannot be opened.
        """
        named = select(RunRow).filter_by(project=self._project, run=check_name("run", run))
        with self._service.database.read() as session:
            row = session.execute(named).scalar_one_or_none()
            if row is None:
                raise NotFoundError(f"run {self._project}/{run}: not found", "it was deleted meanwhile")
            place = row.place
        return self._service.stores.of_run(place, run)

    def _log(self, problem: str) -> None:
        _log.warning("project %s: an attempt is evaluated without reference runs: %s", self._project, problem)
