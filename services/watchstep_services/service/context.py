"""What every part of the service works with, gathered once at start."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from watchstep.errors import ConfigError
from watchstep_launch.backend import Backend
from watchstep_launch.backend_registry import IN_SERVICE, open_backend
from watchstep_launch.backends.local.backend import Local
from watchstep_launch.job_status import JobLooks
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
from watchstep_services.core.settings import Settings
from watchstep_services.db.encryption import SecretBox
from watchstep_services.db.engine import Database
from watchstep_services.service.caches import HistoryCache, RememberedCache
from watchstep_services.service.listings import ListingTimes, RefusedDocuments
from watchstep_services.service.rule_time import LargeTurn, UsualTime
from watchstep_services.stores.bulkhead import Bulkhead, HangingStores
from watchstep_services.stores.opening import Stores, check_endpoint

_INTAKE_THREADS = 2
_STATUS_THREADS = 16
_LOOK_THREADS = 4

_log = logging.getLogger(__name__)


class Notifier(Protocol):
    """Tells those who work that there is something to do. A hint: what is lost, the sweep finds."""

    def run_changed(self, run_id: int, worker: str = "") -> None:
        """A run may have segments to judge; the worker that judged it last still holds its earlier rows."""

    def action_due(self, action_id: int, post: DeliveryKey | None = None) -> None:
        """An action may be done now; one that is known to tell somebody comes with whom."""

    def backtest_due(self, number: int) -> None:
        """The next run of a backtest may be judged."""


class Silent:
    """Tells nobody; the sweep finds everything."""

    def run_changed(self, run_id: int, worker: str = "") -> None:
        """Nothing."""

    def action_due(self, action_id: int, post: DeliveryKey | None = None) -> None:
        """Nothing."""

    def backtest_due(self, number: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Service:
    """One process's view of the service.

    Attributes:
        settings: as given.
        database: the truth.
        base_url: where people reach the API, without a closing slash.
        owner_rules: judge every run; may stop jobs.
        notifier: whom to tell of work.
        backends: what stops jobs, by kind: those that this process has of its own. Of other kinds, a backend is made
            of the settings that it is registered with (`backend_of`).
        opened_backends: those that this process has made of settings.
        job_looks: how jobs were when they were last looked at.
        owner_backends: the owner's file of backends, which any project's jobs may be on; None where admins register them.
        stores: opened stores.
        patience: asks stores that may not answer, where others wait for their turn.
        hanging_stores: at which evaluations of this process had no answer.
        local_jobs: whether the jobs of a project that its first run makes may be processes of this machine.
        histories: earlier rows of runs that this process has judged.
        remembered: what their rules remember.
        refused_documents: damaged documents of runs that this process has read.
        listing_times: how long this process's listings of runs took.
        large_turn: whose large evaluation this process judges.
        usual_time: of this process's evaluations that is not charged to projects yet.
        receiver_file: the owner's receivers, for all projects.
        worker: name of the worker that this process belongs to; empty for none.
        untaken: (project, run) of runs that were found and could not be taken in, of which the log has told.
        known: (project, run) of runs that listings need not ask the database for.
        begun_ns: (project, run) on a folder → when an attempt was last seen to begin.
        begun_from: project → the folder at which its next turn looks for attempts that have begun.
        intake: threads that take in runs whose rules take long to check.
        status_threads: threads that ask backends how jobs are, where nobody waits for an answer for long.
        look_threads: threads that look at runs on local stores.
        in_intake: (project, run) of runs that wait for these threads, or are taken in by them, and sizes of their documents.
    """

    settings: Settings
    database: Database
    base_url: str
    owner_rules: tuple[RuleConfig, ...]
    notifier: Notifier = field(default_factory=Silent)
    backends: Mapping[str, Backend] = field(default_factory=lambda: {"local": Local()})
    owner_backends: Path | None = None
    job_looks: JobLooks = field(default_factory=JobLooks)
    opened_backends: dict[str, Backend] = field(default_factory=dict)
    stores: Stores = field(default_factory=Stores)
    patience: Bulkhead = field(default_factory=Bulkhead)
    hanging_stores: HangingStores = field(default_factory=HangingStores)
    local_jobs: bool = True
    histories: HistoryCache = field(default_factory=HistoryCache)
    remembered: RememberedCache = field(default_factory=RememberedCache)
    refused_documents: RefusedDocuments = field(default_factory=RefusedDocuments)
    listing_times: ListingTimes = field(default_factory=ListingTimes)
    large_turn: LargeTurn = field(default_factory=LargeTurn)
    usual_time: UsualTime = field(default_factory=UsualTime)
    receiver_file: ReceiverFile = field(default_factory=ReceiverFile)
    worker: str = ""
    untaken: set[tuple[str, str]] = field(default_factory=set)
    known: set[tuple[str, str]] = field(default_factory=set)
    begun_ns: dict[tuple[str, str], int] = field(default_factory=dict)
    begun_from: dict[str, int] = field(default_factory=dict)
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

    def backend_of(self, kind: str, settings: Mapping[str, Any]) -> Backend | None:
        """What reaches the jobs of a registered backend; None where this process has nothing for its kind."""
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

    def unknown_receivers(self, config: RuleConfig, known: frozenset[str] | None = None) -> list[str]:
        """What to say of receivers that a rule config names and nobody is known for; empty where all are.

        Args:
            config: of a rule.
            known: receivers of the project; the owner's alone where it is None.
        """
        names = self.receiver_file.names if known is None else known
        return [
            f"receiver {name!r} is not known to this service: nobody is told"
            for name in config.receivers
            if name not in names
        ]


def owner_rules(settings: Settings) -> tuple[RuleConfig, ...]:
    """The owner's rules: their file's, or the defaults. From now on this process runs programs as the settings say.

    Raises:
        RuleError: the file is missing or not valid.
    """
    set_demand(settings.python_rules)
    limit_processes(settings.rule_processes, settings.query_processes, settings.rule_memory_mb)
    return DEFAULT_RULES if settings.rules_file is None else rule_file.load(settings.rules_file)


def owner_receivers(settings: Settings) -> ReceiverFile:
    """The owner's receivers: their file's, or none. What else receivers need of the settings is seen to be good.

    Raises:
        ConfigError: the file is missing or not valid, or the key for secrets or the allowed addresses are not.
    """
    SecretBox(settings)
    parse_allowed(settings.allowed_addresses)
    return ReceiverFile() if settings.receivers_file is None else receiver_file.load(settings.receivers_file)
