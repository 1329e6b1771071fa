"""The objects that all parts of the service share, created once at start."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from watchstep.errors import ConfigError
from watchstep_launch.backend import IN_SERVICE, Backend, open_backend
from watchstep_launch.backends.local.backend import Local
from watchstep_launch.job_record import JobPolling
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.confinement import set_demand
from watchstep_rules.custom.sandbox.pool import limit_processes
from watchstep_rules.rule_files import rule_file
from watchstep_services.channels import receiver_file
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.core.due_action import DeliveryKey
from watchstep_services.core.egress import parse_allowed
from watchstep_services.core.fair_threads import FairThreads
from watchstep_services.core.links import PageLinks
from watchstep_services.core.settings import Settings
from watchstep_services.db.encryption import SecretBox
from watchstep_services.db.engine import Database
from watchstep_services.service.caches import HistoryCache, PictureCache, RuleStateCache
from watchstep_services.service.listings import ListingTimes, RefusedDocuments
from watchstep_services.service.rule_time import EvaluationThreads, LargeTurn, RunBatchSize, UsualTime
from watchstep_services.service.waiting_segments import WaitingRoom
from watchstep_services.stores.bulkhead import Bulkhead, HangingStores
from watchstep_services.stores.opening import Stores, check_endpoint

_INTAKE_THREADS = 2
_STATUS_THREADS = 16
_LOOK_THREADS = 4

_log = logging.getLogger(__name__)


class StoppingError(Exception):
    """The process ends. The evaluation is left to the next process."""


class Notifier(Protocol):
    """Notifies workers of new work. Notifications are hints: the sweep finds work with a lost notification."""

    def run_changed(self, run_id: int, worker: str = "") -> None:
        """A run may have new segments; ``worker`` evaluated it last and has its earlier rows cached."""

    def action_due(self, action_id: int, post: DeliveryKey | None = None) -> None:
        """An action is due; ``post`` names its receiver, if it is a notification and the receiver is known."""

    def backtest_due(self, number: int) -> None:
        """The next run of a backtest is due."""


class NullNotifier:
    """Notifies no worker; the sweep finds all work."""

    def run_changed(self, run_id: int, worker: str = "") -> None:
        """Do nothing."""

    def action_due(self, action_id: int, post: DeliveryKey | None = None) -> None:
        """Do nothing."""

    def backtest_due(self, number: int) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Service:
    """The state of one service process.

    Attributes:
        settings: the settings.
        database: the database.
        base_url: URL of the API, without a trailing slash; `links` has the addresses of the web page.
        owner_rules: rules that are evaluated on every run and may stop jobs.
        notifier: notifies workers of new work.
        backends: this process's own backends, by kind. Backends of other kinds are created from the settings that
            they are registered with (`backend_of`).
        opened_backends: backends that this process has created from settings.
        job_polling: last known statuses of jobs.
        owner_backends: the owner's file of backends, which jobs of any project may use; None if admins register backends.
        stores: opened stores.
        bulkhead: calls stores that may not answer without blocking the caller's other work.
        hanging_stores: stores that did not answer this process's evaluations.
        local_jobs: whether jobs of a project that its first run creates may be processes of this machine.
        histories: cache of earlier rows of runs that this process has evaluated.
        rule_states: cache of their rule configs and states.
        pictures: cache of pictures of alerts.
        refused_documents: damaged documents of runs that this process has read.
        listing_times: durations of this process's listings of runs.
        waiting_room: how many more announced segments each project may have waiting.
        large_turn: the large evaluations in progress in this process.
        evaluation_threads: the threads of this process that evaluate runs, by project.
        usual_time: rule time of this process's evaluations that is not charged to projects yet.
        batch_size: how many runs this process evaluates together.
        receiver_file: the owner's receivers, for all projects.
        worker: name of the worker that this process belongs to; empty for none.
        failed_intakes: (project, run) of runs that were found and could not be registered, which were logged.
        known_runs: (id of the project's store, run) of runs that are known to be in the database.
        begun_ns: (id of the project's store, run) on a folder → when an attempt was last seen to begin.
        begun_from: id of the project's store → index of the folder at which the next search for begun attempts starts.
        intake: threads that register runs with rules that take long to check.
        status_threads: threads that request the status of jobs from backends, for callers with a short timeout.
        look_threads: threads that poll runs on local stores.
        in_intake: (project, run) of runs that wait for, or are in, the intake, and sizes of their documents.
        stopping: set when the process begins to end, which ends large evaluations in progress.
    """

    settings: Settings
    database: Database
    base_url: str
    owner_rules: tuple[RuleConfig, ...]
    notifier: Notifier = field(default_factory=NullNotifier)
    backends: Mapping[str, Backend] = field(default_factory=lambda: {"local": Local()})
    owner_backends: Path | None = None
    job_polling: JobPolling = field(default_factory=JobPolling)
    opened_backends: dict[str, Backend] = field(default_factory=dict)
    stores: Stores = field(default_factory=Stores)
    bulkhead: Bulkhead = field(default_factory=Bulkhead)
    hanging_stores: HangingStores = field(default_factory=HangingStores)
    local_jobs: bool = True
    histories: HistoryCache = field(default_factory=HistoryCache)
    rule_states: RuleStateCache = field(default_factory=RuleStateCache)
    pictures: PictureCache = field(default_factory=PictureCache)
    refused_documents: RefusedDocuments = field(default_factory=RefusedDocuments)
    listing_times: ListingTimes = field(default_factory=ListingTimes)
    waiting_room: WaitingRoom = field(default_factory=WaitingRoom)
    large_turn: LargeTurn = field(default_factory=LargeTurn)
    evaluation_threads: EvaluationThreads = field(default_factory=EvaluationThreads)
    usual_time: UsualTime = field(default_factory=UsualTime)
    batch_size: RunBatchSize = field(default_factory=RunBatchSize)
    receiver_file: ReceiverFile = field(default_factory=ReceiverFile)
    worker: str = ""
    failed_intakes: set[tuple[str, str]] = field(default_factory=set)
    known_runs: set[tuple[int, str]] = field(default_factory=set)
    begun_ns: dict[tuple[int, str], int] = field(default_factory=dict)
    begun_from: dict[int, int] = field(default_factory=dict)
    intake: FairThreads = field(
        default_factory=lambda: FairThreads(_INTAKE_THREADS, "watchstep-intake", per_project=1)
    )
    status_threads: FairThreads = field(
        default_factory=lambda: FairThreads(
            _STATUS_THREADS, "watchstep-status", per_project=_STATUS_THREADS // 4
        )
    )
    look_threads: FairThreads = field(
        default_factory=lambda: FairThreads(_LOOK_THREADS, "watchstep-look", per_project=1)
    )
    in_intake: dict[tuple[str, str], int] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def links(self) -> PageLinks:
        """Links to the web page; empty without a public URL."""
        return PageLinks(self.settings.public_url.rstrip("/"))

    def check_running(self) -> None:
        """Do nothing while the process runs.

        Raises:
            StoppingError: it begins to end.
        """
        if self.stopping.is_set():
            raise StoppingError

    def backend_of(self, kind: str, settings: Mapping[str, Any]) -> Backend | None:
        """The backend for the jobs of a registered backend; None if this process has none for its kind."""
        if kind in self.backends:
            return self.backends[kind]
        if kind not in IN_SERVICE and self.owner_backends is None:
            return None
        named = json.dumps([kind, dict(settings)], sort_keys=True)
        try:
            if named not in self.opened_backends:
                check_endpoint(str(settings.get("address", "")))  # of a Ray cluster
                self.opened_backends[named] = open_backend(kind, settings)
            return self.opened_backends[named]
        except ConfigError as error:
            _log.warning("backend of kind %s: %s", kind, error.what)
            return None

    def unknown_receivers(self, config: RuleConfig, receivers: frozenset[str] | None = None) -> list[str]:
        """Messages on receivers that a rule config names and that do not exist; empty if all do.

        Args:
            config: the rule config.
            receivers: receivers of the project; None for the owner's only.
        """
        names = self.receiver_file.names if receivers is None else receivers
        return [
            f"receiver {name!r} does not exist in this service: it is not notified"
            for name in config.receivers
            if name not in names
        ]


def owner_rules(settings: Settings) -> tuple[RuleConfig, ...]:
    """Load the owner's rules from their file, or return the defaults. Also sets the limits of rule programs in this process.

    Raises:
        RuleError: the file is missing or not valid.
    """
    set_demand(settings.python_rules)
    limit_processes(settings.rule_processes, settings.query_processes, settings.rule_memory_mb)
    return DEFAULT_RULES if settings.rules_file is None else rule_file.load(settings.rules_file)


def owner_receivers(settings: Settings) -> ReceiverFile:
    """Load the owner's receivers from their file, or return none. Also checks the other settings of receivers.

    Raises:
        ConfigError: the file is missing or not valid, or the key for secrets or the allowed addresses are not valid.
    """
    SecretBox(settings)
    parse_allowed(settings.allowed_addresses)
    return ReceiverFile() if settings.receivers_file is None else receiver_file.load(settings.receivers_file)
