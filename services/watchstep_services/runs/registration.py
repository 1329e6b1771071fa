"""Registration: runs enter the database through the API or from the store.

The cost of rules that a recorder requests is limited, because a recorder does not pay for the service.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
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
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import insert_missing, is_of_all
from watchstep_services.db.models import BoundJobRow, Project, ProjectStore, RunRow, StoreRow
from watchstep_services.db.records import hint
from watchstep_services.runs import attempts, rule_configs
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.runs.rule_configs import MOST_RULES, Origin
from watchstep_services.runs.stops import retry_unconfirmed
from watchstep_services.service.context import Service
from watchstep_services.tenancy import (
    NamedStore,
    StoreNotAllowedError,
    allow_local,
    allow_owned,
    allowed_backend,
    create_project,
    find_project,
    open_project,
    own_store,
    own_stores,
    place_for,
)

MOST_OF_A_RULE = 5
MOST_QUERIES = 3
MOST_SECONDS = 1.0
"""Limit for one step of one query, as by default; over the rows of a step it takes a few milliseconds."""

MOST_MIB = 256

_HINT = "have an operator request it, or add it to the service's rule file"


def check(requested: Sequence[RuleConfig]) -> None:
    """Check that rules which a recorder requests do not occupy the workers.

    Raises:
        RuleError: too many rules, copies of one, or a SQL rule with too high limits.
    """
    _check_counts([config.rule for config in requested])
    names: dict[str, str] = {}
    for config in requested:
        content = config.model_copy(update={"name": ""}).model_dump_json(by_alias=True)
        first = names.setdefault(content, config.name)
        if first != config.name:
            raise RuleError(f"rule {config.name!r}: equals {first!r} except for its name", "request it once")
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
        RuleError: too many rules, or too many configs of one rule.
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
    for rule, count in Counter(rule for rule in rules if isinstance(rule, str)).items():
        if rule == Sql.name and count > MOST_QUERIES:
            raise RuleError(f"{count} SQL rules; a recorder may request {MOST_QUERIES}", _HINT)
        if count > MOST_OF_A_RULE:
            raise RuleError(
                f"{count} rule configs of {rule!r}; a recorder may request {MOST_OF_A_RULE} of a rule", _HINT
            )


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


@dataclass(frozen=True)
class RunOrigin:
    """How a run is recorded.

    Attributes:
        store: URL of the store that its recorder writes to; empty for that of the project's new runs.
        registered_by: the id of the token of the requesting operator, who becomes the owner of a new run (`api.run_tokens`).
    """

    store: str = ""
    registered_by: str = ""


DEFAULT_ORIGIN = RunOrigin()


def register(
    service: Service,
    project: str,
    run: str,
    requested: tuple[RuleConfig, ...],
    origin: Origin,
    source: RunOrigin = DEFAULT_ORIGIN,
) -> int:
    """Register a run with the owner's rules and the requested ones. Safe to repeat.

    Args:
        service: the service.
        project: name of its project; see `ensure_project`.
        run: name of the run.
        requested: rule configs. An operator's replace the owner's of the same name; a recorder's inhibit nothing. They stop the job
            if an operator has allowed it (`runs.stops.allow`).
        origin: who requests it.
        source: the store that it is recorded to, and who records it.

    Returns:
        The run's id in the database.

    Raises:
        BadNameError: a name is not valid.
        NotFoundError, ConflictError: as raised by `ensure_project`.
        StoreNotAllowedError: the store is a bucket that is not registered for the project, or the run is on another store.
        RuleError: a recorder requests more than it may (`check`), or did with its earlier requests.
    """
    layout.run_prefix(project, run)
    if origin == "recorder":
        check(requested)
    store = NamedStore.of(source.store, project)
    owners, others = rule_configs.encode(service.owner_rules), rule_configs.encode(requested)
    with service.database.write() as session:
        named = find_place(session, service, project, store)
        placed = named or find_project(session, project).placed
        now = read_clock(session)
        values = {
            "project": project, "run": run, "project_store_id": placed.id, "state": "created", "attempt": "", "epoch": 0, "lease_until_ns": 0,
            "cursor": "{}", "journal": 0, "ticks": 0, "last_step": -1, "control": ControlDocument().as_data(),
            "health": {}, "created_ns": now, "last_seen_ns": now, "listed_ns": 0, "hints": 0,
            "registered_by": source.registered_by,
        }  # fmt: skip
        insert_missing(session, RunRow, values)
        row = session.execute(select(RunRow).filter_by(project=project, run=run)).scalar_one()
        if named is not None and row.project_store_id != named.id:
            raise StoreNotAllowedError(
                f"run {project}/{run}: registered on store {row.place.location}, not on {named.place.location}",
                "give the run another name, or continue it on its store",
            )
        rule_configs.put_all(session, row, owners, others, origin)
        session.execute(
            update(RunRow)
            .where(RunRow.id == row.id)
            .values(listed_ns=0, poll_ns=0, poll_interval_ns=0, registered_ns=now)
        )
        return row.id


def find_place(
    session: Session, service: Service, project: str, store: NamedStore | None
) -> ProjectStore | None:
    """Find the location of a run that its recorder writes to a store (`tenancy.place_for`), in a project as by `ensure_project`."""
    ensure_project(session, service, project)
    own: Sequence[StoreRow] = ()
    if store is not None and service.settings.new_projects == "on_first_run":
        own_store(session, service.settings.store)
        own = own_stores(session)
    return place_for(session, find_project(session, project), store, own)


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

    A store of a project that does not answer is logged and counted, is listed less often, and delays the others for at most
    `Settings.store_wait_seconds`, once; runs that are found later are not returned. The same is true of
    the service's own stores, which are listed for new projects. Runs with SQL rules are registered by threads, fairly by
    project, because checking their queries takes seconds. They are waited for equally long, unless earlier ones of their
    project are still waiting.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    for store in _own_folders(service):
        _attempted(service, "", store, functools.partial(_discover_projects, service, store))
    with service.database.read() as session:
        listed = (
            select(ProjectStore)
            .join(Project, Project.name == ProjectStore.project)
            .where(Project.archived_ns.is_(None))
            .order_by(ProjectStore.project, ProjectStore.id)
        )
        places = [(row.id, row.place) for row in session.execute(listed).scalars()]
    intakes: list[_Intake] = []
    until = time.monotonic() + _ALL_SECONDS
    for row_id, place in places:
        listing = functools.partial(_discover_in, service, row_id, place, until)
        intakes += service.bulkhead.call(
            place.registration,
            functools.partial(_attempted, service, place.project, place.location, listing, row_id),
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


def _attempted(
    service: Service, project: str, store: str, listing: Callable[[], list[_Intake]], row_id: int = 0
) -> list[_Intake]:
    """The result of a listing of a store; empty if it failed, which is logged once until a listing succeeds."""
    key = (project, f"on {store}")  # not the name of a run
    began = time.monotonic()
    try:
        intakes = listing()
    except Exception as error:
        if is_of_all(error):
            raise
        message = error.what if isinstance(error, WatchstepError) else ""
        metrics.SWEEP_FAULTS.labels("project").inc()
        if key not in service.failed_intakes:
            service.failed_intakes.add(key)
            where = f"runs of project {project}" if project else "new projects"
            _log.warning(
                "%s cannot be listed: %s; it is tried again", where, message or error,
                exc_info=None if message else error,
            )  # fmt: skip
        if row_id:
            _put_off(service, row_id, time.monotonic() - began)
        return []
    service.failed_intakes.discard(key)
    return intakes


def _put_off(service: Service, row_id: int, seconds: float) -> None:
    """Postpone the next listing of a store that failed, in proportion to the time it took, because it delays the sweep."""
    with service.database.write() as session:
        session.execute(
            update(ProjectStore)
            .where(ProjectStore.id == row_id)
            .values(listed_ns=now_ns() + nanoseconds(_TIMES_AS_LONG * seconds))
            .execution_options(synchronize_session=False)
        )


def _own_folders(service: Service) -> list[str]:
    """The service's own stores on which folders become projects.

    In a bucket, projects are created by registration: listing it every second costs money.
    """
    if service.settings.new_projects != "on_first_run":
        return []
    with service.database.read() as session:
        urls = {service.settings.store, *(row.url for row in own_stores(session))}
    return sorted(url for url in urls if StoreRegistration(url).is_local)


def _discover_projects(service: Service, store: str) -> list[_Intake]:
    root = service.stores.open(store)
    with service.database.read() as session:
        on_it = select(ProjectStore.project).join(StoreRow).where(StoreRow.url == store)
        known_projects = set(session.execute(on_it).scalars())
        closed = select(Project).where(Project.name.not_in(known_projects))
        known_projects.update(
            project.name
            for project in session.execute(closed).unique().scalars()
            if project.archived_ns is not None or not project.placed.store.is_own
        )
    for name in root.folders():
        if name in known_projects or not _is_name(name):
            continue
        try:
            named = NamedStore.of(store, name)
            with service.database.write() as session:
                find_place(session, service, name, named)
        except WatchstepError as error:
            if (name, "") not in service.failed_intakes:
                service.failed_intakes.add((name, ""))
                _log.warning("project %s cannot be registered: %s", name, error.what)
    return []


def _discover_in(service: Service, row_id: int, place: StorePlace, until: float) -> list[_Intake]:
    """Register a project's new runs on one of its stores for a limited time; after ``until`` (monotonic clock), only one."""
    store, project = service.stores.of(place), place.project
    interval = service.settings.listing_ns(local=store.is_local)
    with service.database.write() as session:
        # One of several workers lists it, at most once per interval.
        turn = session.execute(
            update(ProjectStore)
            .where(ProjectStore.id == row_id, ProjectStore.listed_ns <= now_ns() - interval)
            .values(listed_ns=now_ns())
            .returning(ProjectStore.id)
            .execution_options(synchronize_session=False)
        ).scalar_one_or_none()
    if turn is None:
        return []
    names = store.folders(f"{project}/")
    if store.is_local:
        _poll_restarted(service, store, (row_id, project), names)
    fresh = [
        name
        for name in _unknown_names(service, (row_id, place), names)
        if _is_name(name) and (project, name) not in service.in_intake
    ]
    is_behind = any(of == project for of, _ in list(service.in_intake))
    intakes: list[_Intake] = []
    until = min(until, time.monotonic() + SLICE_SECONDS)
    for name in fresh:
        intake = _intake_of(service, store, place, name)
        if intake is not None and not (is_behind and isinstance(intake, Future)):
            intakes.append(intake)
        # Other projects and due stops wait for this sweep.
        if time.monotonic() >= until:
            break
    return intakes


def _poll_restarted(service: Service, store: Store, of: tuple[int, str], names: Sequence[str]) -> None:
    """Make ended runs due for a poll if an attempt has begun in their folder, because nothing announces it.

    A folder's time shows it without a listing of each run. In a bucket only polls of ended runs find it.
    """
    row_id, project = of
    first = service.begun_from.get(row_id, 0) if len(names) > _MOST_FOLDERS else 0
    window = names[first : first + _MOST_FOLDERS]
    service.begun_from[row_id] = first + _MOST_FOLDERS if first + _MOST_FOLDERS < len(names) else 0
    begun, recently = [], time.time_ns() - _RECENT_NS
    for name in window:
        changed = store.changed_ns(f"{project}/{name}/{layout.ATTEMPTS}")
        before = service.begun_ns.get((row_id, name))
        service.begun_ns[row_id, name] = changed
        if changed != before and (before is not None or changed > recently):
            begun.append(name)
    for start in range(0, len(begun), _NAMES_AT_ONCE):
        chosen = (RunRow.project_store_id == row_id, RunRow.run.in_(begun[start : start + _NAMES_AT_ONCE]))
        with service.database.write() as session:
            session.execute(
                update(RunRow)
                .where(*chosen, RunRow.state.in_((*ENDED, "lost")))
                .values(poll_ns=0, listed_ns=0)
                .execution_options(synchronize_session=False)
            )


def _unknown_names(service: Service, of: tuple[int, StorePlace], names: Iterable[str]) -> list[str]:
    """Names of runs on a store that are not in the database; known names are cached. Runs that are on another store are logged once."""
    row_id, place = of
    project, elsewhere = place.project, set()
    fresh = [name for name in names if (row_id, name) not in service.known_runs]
    for start in range(0, len(fresh), _NAMES_AT_ONCE):
        unchecked = fresh[start : start + _NAMES_AT_ONCE]
        with service.database.read() as session:
            rows = session.execute(
                select(RunRow.run, RunRow.project_store_id).where(
                    RunRow.project == project, RunRow.run.in_(unchecked)
                )
            ).all()
        service.known_runs.update((row_id, row.run) for row in rows if row.project_store_id == row_id)
        elsewhere |= {row.run for row in rows if row.project_store_id != row_id}
    for name in sorted(elsewhere):
        key = (project, f"{name} on {place.location}")
        if key not in service.failed_intakes:
            service.failed_intakes.add(key)
            _log.warning(
                "run %s/%s on %s is not evaluated: a run of this name is on another store of the project",
                project, name, place.location,
            )  # fmt: skip
    return [name for name in fresh if (row_id, name) not in service.known_runs and name not in elsewhere]


def _intake_of(service: Service, store: Store, place: StorePlace, run: str) -> _Intake | None:
    """Register a run, or submit its registration; None if there is no run, or it cannot be registered now."""
    project = place.project
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
        return _register_document(service, place, run, document)
    if not _has_room(service, project):
        return None
    service.in_intake[project, run] = size
    return service.intake.submit(project, functools.partial(_check, service, place, run, document))


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


def _check(service: Service, place: StorePlace, run: str, document: RunDocument) -> int | None:
    """Register a run in a thread of the intake."""
    try:
        with on_behalf_of(place.project):
            return _register_document(service, place, run, document)
    finally:
        del service.in_intake[place.project, run]


def _register_document(
    service: Service, place: StorePlace, run: str, document: RunDocument | Exception
) -> int | None:
    """Register a run. An error is logged, and does not affect other runs."""
    try:
        run_id = _registered(service, place, run, document)
    except Exception as error:  # noqa: BLE001 - the document may contain anything
        _log_failure(service, place.project, run, error)
        return None
    service.failed_intakes.discard((place.project, run))
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


def _registered(service: Service, place: StorePlace, run: str, document: RunDocument | Exception) -> int:
    project, store = place.project, place.location
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
        run_id = register(service, project, run, requested, "recorder", RunOrigin(store))
    except Exception as error:
        if not requested:
            raise
        problem = f"its rules cannot be stored: {type(error).__name__}: {error}"
        run_id = register(service, project, run, (), "recorder", RunOrigin(store))
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
