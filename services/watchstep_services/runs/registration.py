"""Registration: runs enter the database through the API or from the store.

The cost of rules that a recorder requests is limited, because a recorder does not pay for the service.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from watchstep.errors import (
    BadNameError,
    ConfigError,
    FormatError,
    NotFoundError,
    RuleError,
    StoreError,
    WatchstepError,
)
from watchstep.format import documents, layout
from watchstep.format.control import ControlDocument
from watchstep.format.documents import RunDocument
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.python_rule import NOT_FROM_RECORDERS, no_programs
from watchstep_rules.custom.sandbox.pool import BusyError, on_behalf_of
from watchstep_rules.custom.sql.rule import Sql, SqlParams
from watchstep_rules.rule_files import rule_file
from watchstep_services import tenancy
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import insert_missing, is_of_all
from watchstep_services.db.models import BoundJobRow, Project, RunRow
from watchstep_services.db.records import hint
from watchstep_services.runs import attempts, rule_configs
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.runs.rule_configs import Origin
from watchstep_services.runs.stops import retry_unconfirmed
from watchstep_services.service.context import Service
from watchstep_services.tenancy import (
    allow_local,
    allow_owned,
    allowed_backend,
    create_project,
    open_project,
    own_store,
)

MOST_RULES = 100
MOST_QUERIES = 3
MOST_SECONDS = 1.0
"""Limit for one step of one query, as by default; over the rows of a step it takes a few milliseconds."""

MOST_MIB = 256

_HINT = "have an operator request it, or add it to the service's rule file"


def check(requested: Sequence[RuleConfig]) -> None:
    """Check that rules which a recorder requests do not occupy the workers.

    Raises:
        RuleError: too many rules, or a SQL rule with too high limits.
    """
    _check_counts([config.rule for config in requested])
    queries = [(config.name, config.parameters) for config in requested if config.rule == Sql.name]
    for name, params in queries:
        assert isinstance(params, SqlParams)
        if params.seconds > MOST_SECONDS or params.memory_mb > MOST_MIB:
            raise RuleError(
                f"rule {name!r}: seconds = {params.seconds:g}, memory_mb = {params.memory_mb}; the limits of a recorder's SQL rule are "
                f"{MOST_SECONDS:g} s and {MOST_MIB} MiB for each step",
                _HINT,
            )


def check_counts(data: Sequence[Any]) -> None:
    """Refuse too many rules before any query is checked, because a check starts a process and takes seconds.

    Raises:
        RuleError: too many rules, or too many SQL rules.
    """
    _check_counts(_rules_in(data))


def has_queries(data: Sequence[Any]) -> bool:
    """Whether rules contain SQL rules, which take a process and seconds to check."""
    return any(rule == Sql.name for rule in _rules_in(data))


def _rules_in(data: Sequence[Any]) -> list[Any]:
    return [entry.get("rule") if isinstance(entry, dict) else None for entry in data]


def _check_counts(rules: Sequence[Any]) -> None:
    if len(rules) > MOST_RULES:
        raise RuleError(f"{len(rules)} rules; a recorder may request {MOST_RULES}", _HINT)
    queries = sum(rule == Sql.name for rule in rules)
    if queries > MOST_QUERIES:
        raise RuleError(f"{queries} SQL rules; a recorder may request {MOST_QUERIES}", _HINT)


SLICE_SECONDS = 2.0
"""Time for which a listing registers new runs of a project; the others are registered at the next listings."""

_ALL_SECONDS = 5.0
"""Time for which the listings of all projects register new runs; after it, each registers one."""

_MOST_OWN_BYTES = 4 * 1024 * 1024
_MOST_BYTES = 64 * 1024 * 1024
"""Limits of documents that wait for the check of their rules, of one project and of all; each project may have one."""

_MOST_FOLDERS = 2000
"""Folders of runs with times that one listing reads, in about ten milliseconds."""

_RECENT_NS = 3600 * NANOSECONDS
"""At a process's first listing, only attempts that began in this time are polled."""

_NAMES_AT_ONCE = 500
_TIMES_AS_LONG = 4

_log = logging.getLogger(__name__)

_Intake = int | Future[int | None]
"""A run's id, or the future that returns it once the run is registered."""


def register(
    service: Service,
    project: str,
    run: str,
    requested: tuple[RuleConfig, ...],
    origin: Origin,
    registered_by: str = "",
) -> int:
    """Register a run with the owner's rules and the requested ones. Safe to repeat.

    Args:
        service: the service.
        project: name of its project; see `ensure_project`.
        run: name of the run.
        requested: rule configs. An operator's replace the owner's of the same name; a recorder's inhibit nothing. They stop the job
            if an operator has allowed it (`runs.stops.allow`).
        origin: who requests it.
        registered_by: the id of the token of the requesting operator, who becomes the owner of a new run (`api.run_tokens`).

    Returns:
        The run's id in the database.

    Raises:
        BadNameError: a name is not valid.
        NotFoundError, ConflictError: as raised by `ensure_project`.
        RuleError: a recorder requests more than it may (`check`).
    """
    layout.run_prefix(project, run)
    if origin == "recorder":
        check(requested)
    with service.database.write() as session:
        ensure_project(session, service, project)
        now = read_clock(session)
        values = {
            "project": project, "run": run, "state": "created", "attempt": "", "epoch": 0, "lease_until_ns": 0,
            "cursor": "{}", "journal": 0, "ticks": 0, "last_step": -1, "control": ControlDocument().as_data(),
            "health": {}, "created_ns": now, "last_seen_ns": now, "listed_ns": 0, "hints": 0,
            "registered_by": registered_by,
        }  # fmt: skip
        insert_missing(session, RunRow, values)
        row = session.execute(select(RunRow).filter_by(project=project, run=run)).scalar_one()
        rule_configs.put_all(session, row, service.owner_rules, requested, origin)
        session.execute(
            update(RunRow).where(RunRow.id == row.id).values(listed_ns=0, poll_ns=0, poll_interval_ns=0)
        )
        return row.id


def ensure_project(session: Session, service: Service, project: str) -> None:
    """Check that a project accepts runs; create an unknown one on the service's own store if the settings allow it.

    Raises:
        BadNameError: the name is not valid.
        NotFoundError: it does not exist, and only admins create projects.
        ConflictError: it is archived, or its location is in use.
    """
    layout.check_name("project", project)
    if service.settings.new_projects == "by_admins" or session.get(Project, project) is not None:
        open_project(session, project)
        return
    if create_project(session, project, own_store(session, service.settings.store)) and service.local_jobs:
        allow_local(session, project)


def bind_job(service: Service, run_id: int, attempt: str, job: JobHandle, bound_by: str) -> None:
    """Bind the job of one attempt, so that it can be stopped.

    Raises:
        BadNameError: the attempt's name is not valid.
        ConfigError: the backend is not registered for the run's project, the identity is not valid for it, or another job is
            bound already.
        ConflictError: the job is another project's, or the project is archived.
    """
    layout.check_name("attempt", attempt)
    with service.database.write() as session:
        project = open_project(session, session.get_one(RunRow, run_id).project)
        if service.owner_backends is not None:
            allow_owned(session, project.name, service.owner_backends, job.backend)
        registered = allowed_backend(session, project.name, job.backend)
        kind = registered.kind
        backend = service.backend_of(kind, registered.settings)
        if backend is not None:
            job = backend.settled(job)
        identity = dict(job.identity)
        tenancy.claim_job(session, project.name, kind, job)
        attempts.ensure(session, run_id, attempt)
        values = {
            "run_id": run_id, "attempt": attempt, "backend": job.backend, "job_id": job.id,
            "identity": identity, "bound_by": bound_by, "state": "running",
        }  # fmt: skip
        if not insert_missing(session, BoundJobRow, values):
            bound = session.execute(
                select(BoundJobRow).filter_by(run_id=run_id, attempt=attempt)
            ).scalar_one()
            if (bound.backend, bound.job_id, bound.identity) != (job.backend, job.id, identity):
                raise ConfigError(
                    f"attempt {attempt!r} is bound to job {bound.backend}:{bound.job_id}",
                    "register another attempt for another job",
                )
        retry_unconfirmed(session, run_id, attempt)
        hint(session, run_id)


def discover_runs(service: Service) -> list[int]:
    """Find unregistered runs on the stores; return their ids.

    A project with a store that does not answer is logged and counted, is listed less often, and delays the others for at most
    `Settings.store_wait_seconds`, once; runs that are found later are not returned. The same is true of
    the service's own store, which is listed for new projects. Runs with SQL rules are registered by threads, fairly by
    project, because checking their queries takes seconds. They are waited for equally long, unless earlier ones of their
    project are still waiting.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    _attempted(service, "", lambda: _discover_projects(service))
    with service.database.read() as session:
        projects = list(session.execute(select(Project).filter_by(archived_ns=None)).scalars())
    intakes: list[_Intake] = []
    until = time.monotonic() + _ALL_SECONDS
    for project in projects:
        listing = functools.partial(_discover_in, service, project, until)
        intakes += service.bulkhead.call(
            project.place.registration,
            functools.partial(_attempted, service, project.name, listing),
            service.settings.store_wait_seconds,
            [],
        )
    wait([intake for intake in intakes if isinstance(intake, Future)], service.settings.store_wait_seconds)
    return [run_id for intake in intakes if (run_id := _run_id_of(intake)) is not None]


def _run_id_of(intake: _Intake) -> int | None:
    """The run's id, if it is registered by now."""
    if not isinstance(intake, Future):
        return intake
    return intake.result() if intake.done() and not intake.cancelled() else None


def _attempted(service: Service, project: str, listing: Callable[[], list[_Intake]]) -> list[_Intake]:
    """The result of a listing; empty if it failed, which is logged once until a listing succeeds."""
    began = time.monotonic()
    try:
        intakes = listing()
    except Exception as error:
        if is_of_all(error):
            raise
        message = error.what if isinstance(error, WatchstepError) else ""
        metrics.SWEEP_FAULTS.labels("project").inc()
        if (project, "") not in service.failed_intakes:
            service.failed_intakes.add((project, ""))
            where = f"runs of project {project}" if project else "new projects"
            _log.warning(
                "%s cannot be listed: %s; it is tried again", where, message or error,
                exc_info=None if message else error,
            )  # fmt: skip
        if project:
            _put_off(service, project, time.monotonic() - began)
        return []
    service.failed_intakes.discard((project, ""))
    return intakes


def _put_off(service: Service, project: str, seconds: float) -> None:
    """Postpone the next listing of a store that failed, in proportion to the time it took, because it delays the sweep."""
    with service.database.write() as session:
        session.execute(
            update(Project)
            .where(Project.name == project)
            .values(listed_ns=now_ns() + nanoseconds(_TIMES_AS_LONG * seconds))
            .execution_options(synchronize_session=False)
        )


def _discover_projects(service: Service) -> list[_Intake]:
    root = service.stores.open(service.settings.store)
    # In a bucket, projects are created by registration: listing it every second costs money.
    if not root.is_local or service.settings.new_projects != "on_first_run":
        return []
    with service.database.read() as session:
        known_projects = set(session.execute(select(Project.name)).scalars())
    for name in root.folders():
        if name in known_projects or not _is_name(name):
            continue
        try:
            with service.database.write() as session:
                ensure_project(session, service, name)
        except WatchstepError as error:
            if (name, "") not in service.failed_intakes:
                service.failed_intakes.add((name, ""))
                _log.warning("project %s cannot be registered: %s", name, error.what)
    return []


def _discover_in(service: Service, project: Project, until: float) -> list[_Intake]:
    """Register a project's new runs for a limited time; after ``until`` (monotonic clock), only one."""
    store = service.stores.of(project.place)
    interval = service.settings.listing_ns(local=store.is_local)
    with service.database.write() as session:
        # One of several workers lists the project, at most once per interval.
        turn = session.execute(
            update(Project)
            .where(Project.name == project.name, Project.listed_ns <= now_ns() - interval)
            .values(listed_ns=now_ns())
            .returning(Project.name)
            .execution_options(synchronize_session=False)
        ).scalar_one_or_none()
    if turn is None:
        return []
    names = store.folders(f"{project.name}/")
    if store.is_local:
        _poll_restarted(service, store, project.name, names)
    fresh = [
        name
        for name in _unknown_names(service, project.name, names)
        if _is_name(name) and (project.name, name) not in service.in_intake
    ]
    is_behind = any(of == project.name for of, _ in list(service.in_intake))
    intakes: list[_Intake] = []
    until = min(until, time.monotonic() + SLICE_SECONDS)
    for name in fresh:
        intake = _intake_of(service, store, project.name, name)
        if intake is not None and not (is_behind and isinstance(intake, Future)):
            intakes.append(intake)
        # Other projects and due stops wait for this sweep.
        if time.monotonic() >= until:
            break
    return intakes


def _poll_restarted(service: Service, store: Store, project: str, names: Sequence[str]) -> None:
    """Make ended runs due for a poll if an attempt has begun in their folder, because nothing announces it.

    A folder's time shows it without a listing of each run. In a bucket only polls of ended runs find it.
    """
    first = service.begun_from.get(project, 0) if len(names) > _MOST_FOLDERS else 0
    window = names[first : first + _MOST_FOLDERS]
    service.begun_from[project] = first + _MOST_FOLDERS if first + _MOST_FOLDERS < len(names) else 0
    begun, recently = [], time.time_ns() - _RECENT_NS
    for name in window:
        changed = store.changed_ns(f"{project}/{name}/{layout.ATTEMPTS}")
        before = service.begun_ns.get((project, name))
        service.begun_ns[project, name] = changed
        if changed != before and (before is not None or changed > recently):
            begun.append(name)
    for start in range(0, len(begun), _NAMES_AT_ONCE):
        chosen = (RunRow.project == project, RunRow.run.in_(begun[start : start + _NAMES_AT_ONCE]))
        with service.database.write() as session:
            session.execute(
                update(RunRow)
                .where(*chosen, RunRow.state.in_((*ENDED, "lost")))
                .values(poll_ns=0, listed_ns=0)
                .execution_options(synchronize_session=False)
            )


def _unknown_names(service: Service, project: str, names: Iterable[str]) -> list[str]:
    """Names of runs on a store that are not in the database; known names are cached."""
    fresh = [name for name in names if (project, name) not in service.known_runs]
    for start in range(0, len(fresh), _NAMES_AT_ONCE):
        unchecked = fresh[start : start + _NAMES_AT_ONCE]
        with service.database.read() as session:
            rows = session.execute(
                select(RunRow.run).where(RunRow.project == project, RunRow.run.in_(unchecked))
            )
            service.known_runs.update((project, name) for name in rows.scalars())
    return [name for name in fresh if (project, name) not in service.known_runs]


def _intake_of(service: Service, store: Store, project: str, run: str) -> _Intake | None:
    """Register a run, or submit its registration; None if there is no run, or it cannot be registered now."""
    key = layout.run_prefix(project, run) + layout.RUN_DOCUMENT
    document: RunDocument | Exception
    size = 0
    try:
        document, size = _run_document(store, key)
    except NotFoundError:
        return None  # a folder, not yet a run
    except StoreError as error:
        _log_failure(service, project, run, error)
        return None
    except Exception as error:  # noqa: BLE001 - the document may contain anything
        document = error
    if isinstance(document, Exception) or not has_queries(document.rules):
        return _register_document(service, project, run, document)
    if not _has_room(service, project):
        return None
    service.in_intake[project, run] = size
    return service.intake.submit(project, functools.partial(_check, service, project, run, document))


def _run_document(store: Store, key: str) -> tuple[RunDocument, int]:
    """Read a run's document and its size. If decoding fails it is fetched once more, because one answer may be damaged.

    Raises:
        NotFoundError, StoreError: it cannot be fetched.
        FormatError: it is damaged or has invalid content.
    """
    content = store.get(key, limit=documents.MAX_BYTES)
    try:
        return documents.decode(RunDocument, content, key), len(content)
    except FormatError:
        again = store.get(key, limit=documents.MAX_BYTES)
        if again == content:
            raise
        return documents.decode(RunDocument, again, key), len(again)


def _has_room(service: Service, project: str) -> bool:
    """Whether a document of a project may wait for its check; waiting documents stay in memory."""
    waiting = list(service.in_intake.items())
    own = sum(size for (of, _), size in waiting if of == project)
    return own == 0 or (own < _MOST_OWN_BYTES and sum(size for _, size in waiting) < _MOST_BYTES)


def _check(service: Service, project: str, run: str, document: RunDocument) -> int | None:
    """Register a run in a thread of the intake."""
    try:
        with on_behalf_of(project):
            return _register_document(service, project, run, document)
    finally:
        del service.in_intake[project, run]


def _register_document(
    service: Service, project: str, run: str, document: RunDocument | Exception
) -> int | None:
    """Register a run. An error is logged, and does not affect other runs."""
    try:
        run_id = _registered(service, project, run, document)
    except Exception as error:  # noqa: BLE001 - the document may contain anything
        _log_failure(service, project, run, error)
        return None
    service.failed_intakes.discard((project, run))
    return run_id


def _log_failure(service: Service, project: str, run: str, error: Exception) -> None:
    if (project, run) in service.failed_intakes:
        return
    service.failed_intakes.add((project, run))
    message = error.what if isinstance(error, WatchstepError) else ""
    _log.warning(
        "run %s/%s cannot be registered: %s; it is tried at every listing", project, run, message or error,
        exc_info=None if message else error,
    )  # fmt: skip


def _registered(service: Service, project: str, run: str, document: RunDocument | Exception) -> int:
    requested: tuple[RuleConfig, ...] = ()
    # A recorder's document may contain anything; an error in it is reported in the run's health.
    fault = document if isinstance(document, Exception) else None
    if not isinstance(document, Exception):
        try:
            requested = _requested(document, layout.run_prefix(project, run) + layout.RUN_DOCUMENT)
        except BusyError:
            raise  # not a fault of the document
        except Exception as error:  # noqa: BLE001 - as above
            fault = error
    problem = "" if fault is None else fault.what if isinstance(fault, WatchstepError) else str(fault)
    try:
        run_id = register(service, project, run, requested, "recorder")
    except Exception as error:
        if not requested:
            raise
        problem = f"its rules cannot be stored: {type(error).__name__}: {error}"
        run_id = register(service, project, run, (), "recorder")
    if problem:
        _log.warning("%s", problem)
        with service.database.write() as session:
            row = session.get_one(RunRow, run_id)
            row.health = {**row.health, "run_document": problem.replace("\0", "\ufffd")[:500]}
    return run_id


def _requested(document: RunDocument, key: str) -> tuple[RuleConfig, ...]:
    """The rule configs that a run's document requests."""
    check_counts(document.rules)
    with no_programs(NOT_FROM_RECORDERS):
        return rule_file.check({"rules": list(document.rules)}, key)


def _is_name(name: str) -> bool:
    try:
        layout.check_name("run", name)
    except BadNameError:
        return False
    return True
