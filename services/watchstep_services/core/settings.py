"""The service's settings: arguments, then ``WATCHSTEP_…`` environment variables, then defaults.

Settings of the embedded service follow from its store. Environment variables with the prefix that are no settings are
reported: most often a name was misspelt.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from watchstep.errors import ConfigError
from watchstep.store.store import checked_scheme
from watchstep_rules.custom.sandbox.confinement import DEFAULT, Demand
from watchstep_services.core.redaction import keep_secret, keep_secrets_of, redact

NANOSECONDS = 1_000_000_000
PREFIX = "WATCHSTEP_"


class Settings(BaseSettings):
    """How the service runs. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    home: Path = Field(
        Path("~/.watchstep"), description="The service's own folder: database and service.json."
    )
    store: str = Field("watchstep-runs", description="URL or folder that holds <project>/<run>/.")
    database_url: SecretStr = Field(
        SecretStr(""), description="SQLAlchemy URL; empty for SQLite in the home."
    )
    database_connect_seconds: float = Field(
        10.0, ge=0, description="How long PostgreSQL may take to accept a connection; 0: any time."
    )
    database_dead_seconds: float = Field(
        60.0,
        ge=0,
        description="After so long without an answer of its machine a connection to PostgreSQL is given up, by both sides; "
        "0: when the operating system does.",
    )
    database_statement_seconds: float = Field(
        30.0, ge=0, description="How long one statement may take PostgreSQL; 0: as its server says."
    )
    database_lock_seconds: float = Field(
        10.0,
        ge=0,
        description="How long a statement may wait in PostgreSQL for another's lock; 0: as its server says.",
    )
    database_idle_seconds: float = Field(
        30.0,
        ge=0,
        description="How long PostgreSQL holds a transaction open in which nothing is asked; 0: as its server says.",
    )
    new_projects: Literal["on_first_run", "by_admins"] = Field(
        "on_first_run",
        description="Whether a first run makes its project, on the service's own store, or only admins do: `on_first_run` or "
        "`by_admins`.",
    )
    local_stores: Path | None = Field(
        None, description="Folder below which admins may register folders as stores; none where it is empty."
    )
    local_jobs: bool = Field(
        False,
        description="In production: jobs of a project that its first run makes may be processes of the workers' machine.",
    )
    broker_url: SecretStr = Field(SecretStr(""), description="Redis for Celery; only in production.")
    rules_file: Path | None = Field(None, description="The owner's rule file; the default rules where none.")
    receivers_file: Path | None = Field(
        None, description="The owner's file of receivers and routes, for all projects."
    )
    secret_key: SecretStr | None = Field(
        None,
        description="Encrypts secrets of receivers and addresses of webhooks; of several with commas between, the first encrypts, each "
        "decrypts. Without it `secret.key` in the home encrypts addresses, where the database is SQLite there.",
    )
    allowed_addresses: str = Field(
        "",
        description="Where receivers may be sent to that is not public: `10.1.0.0/16`, names of hosts, `loopback`.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="0 takes a free one.")
    public_url: str = Field("", description="Where people reach the API; host and port where empty.")
    log: Literal["text", "json"] = Field("text", description="Form of the log: for people, or JSON lines.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="What is logged at least."
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port for Prometheus, without a token; 0 for none: `/metrics` of the API needs one.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address that the metrics port listens on.")
    requests_per_minute: int = Field(
        6000, ge=0, description="How often one token may ask, recording apart; 0: as often as it likes."
    )
    recordings_per_minute: int = Field(
        120_000, ge=0, description="How often one token may register and announce; 0: as often as it likes."
    )
    failures_per_minute: int = Field(
        60,
        ge=0,
        description="How often one address may ask without a valid token, and for the API's document; 0: as often as it likes.",
    )
    access_log: bool = Field(False, description="Whether the API logs every request.")
    migrate: Literal["at_start", "never"] = Field(
        "at_start",
        description="Whether processes bring the database's schema up to date: `at_start` or `never`.",
    )
    drain_seconds: float = Field(20.0, gt=0, description="How long requests may run on after SIGTERM.")
    worker_processes: int = Field(2, ge=1, le=1024, description="Processes of one `watchstep worker`.")
    workers: int = Field(4, ge=1, le=64, description="Threads that evaluate and act, when embedded.")
    sweep_seconds: float = Field(1.0, gt=0, description="How often work is looked for without a hint.")
    listing_seconds: float = Field(
        0.0,
        ge=0,
        description="How long a run is quiet before it is listed; 0: 1 for a folder, 30 for a cloud.",
    )
    lease_seconds: float = Field(30.0, gt=0, description="How long one evaluation may hold a run.")
    gap_seconds: float = Field(60.0, ge=0, description="How long a missing segment is waited for.")
    allowed_lateness_seconds: float = Field(
        60.0, ge=0, description="How long a silent worker delays the watermark."
    )
    silent_seconds: float = Field(300.0, gt=0, description="After so long without a sign a run is lost.")
    grace_seconds: float = Field(
        30.0,
        ge=0,
        description="Between asking, terminating and killing a job: time to hear of it, to end a step, and to write.",
    )
    store_wait_seconds: float = Field(
        2.0,
        gt=0,
        description="How long a sweep or a stop waits for a bucket that does not answer before it goes on without it; and a sweep "
        "for checks of new runs' SQL rules.",
    )
    retry_seconds: float = Field(1.0, gt=0, description="Before the second try of an action; doubles.")
    max_tries: int = Field(
        20,
        ge=1,
        description="Tries of an action that fails before it is given up, over about an hour; a stop, only once its attempt is over.",
    )
    webhook_seconds: float = Field(10.0, gt=0, description="How long a receiver may take to answer.")
    query_seconds: float = Field(10.0, gt=0, description="How long one query over statistics may take.")
    query_mb: int = Field(256, ge=16, description="MiB that one query over statistics may take.")
    project_queries: int = Field(
        4, ge=1, description="Queries of one project that a process answers at once; more are refused."
    )
    query_processes: int = Field(
        4,
        ge=1,
        le=64,
        description="SQL queries that a process answers at once, each in a process of its own; of one project half.",
    )
    rule_processes: int = Field(
        8,
        ge=1,
        le=256,
        description="Processes that run Python and SQL rules at once, for each process of the service; up to four more wait.",
    )
    rule_memory_mb: int = Field(
        2048,
        ge=16,
        description="MiB that one Python or SQL rule may ask for; one that asks for more is not judged.",
    )
    rule_seconds: float = Field(
        10.0,
        gt=0,
        description="How long the Python and SQL rules of a run may take together in one evaluation; the rest is not judged.",
    )
    tensor_mb: int = Field(64, ge=1, description="MiB of a tensor that one answer may hold.")
    event_streams: int = Field(
        500, ge=1, description="Event streams that a process keeps open; more are refused."
    )
    project_event_streams: int = Field(
        200, ge=1, description="Event streams of one project that a process keeps open; more are refused."
    )
    token_event_streams: int = Field(
        50, ge=1, description="Event streams of one token that a process keeps open; more are refused."
    )
    header_seconds: float = Field(
        10.0,
        gt=0,
        description="How long a request's headers may take, from the connection or the first byte.",
    )
    body_seconds: float = Field(30.0, gt=0, description="How long a request's body may take.")
    write_seconds: float = Field(
        20.0,
        gt=0,
        description="After so long without reading anything of an answer a client loses its connection.",
    )
    unread_mb: int = Field(
        256,
        ge=1,
        description="MiB of answers that a process holds while clients read them; one project has half of it, one token a "
        "quarter. More are refused.",
    )
    address_connections: int = Field(
        500,
        ge=0,
        description="Connections of one address that a process keeps open; more are refused. 0: any number. "
        "Addresses in `FORWARDED_ALLOW_IPS` are proxies and not limited.",
    )
    python_rules: Demand = Field(
        DEFAULT,
        description="Rules that are programs: `refuse`, `full_only` where a machine shuts them in wholly, or "
        "`allow_partial`.",
    )
    upkeep_seconds: float = Field(
        60.0, gt=0, description="How often ended runs are compacted and cleared away."
    )
    compact_after_seconds: float = Field(
        3600.0, ge=0, description="So long after its end a run is compacted; 0: never."
    )
    originals_seconds: float = Field(
        86400.0,
        ge=0,
        description="How long segments stay on the store after the compaction that replaced them.",
    )
    max_segments: int = Field(200, ge=1, description="Most segments that one evaluation reads.")
    max_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1,
        description="After so many bytes, as segments take in memory, an evaluation reads no more.",
    )

    @property
    def home_folder(self) -> Path:
        """The home, absolute."""
        return self.home.expanduser().absolute()

    @property
    def resolved_database_url(self) -> str:
        """The database's URL; SQLite in the home where none was given."""
        return self.database_url.get_secret_value() or f"sqlite:///{self.home_folder / 'watchstep.sqlite'}"

    def listing_ns(self, *, local: bool) -> int:
        """How long a run is quiet before its store is listed: listing a folder is free, a bucket is not."""
        return nanoseconds(self.listing_seconds or (1.0 if local else 30.0))


def nanoseconds(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * NANOSECONDS)


def load_settings(**values: Any) -> Settings:
    """Settings from arguments and the environment.

    Raises:
        ConfigError: a value cannot be used; the message names the environment variable.
    """
    try:
        settings = Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        raise ConfigError(
            f"{PREFIX}{name.upper()} = {_shown(name, first.get('input'))}: {redact(first['msg'])}",
            f"correct the environment variable, or the argument {name!r}",
        ) from error
    for url in (settings.resolved_database_url, settings.broker_url.get_secret_value()):
        keep_secrets_of(url)
    for key in settings.secret_key.get_secret_value().split(",") if settings.secret_key else ():
        keep_secret(key.strip())
    return settings


def require_production(settings: Settings) -> None:
    """Refuse settings that production cannot run with.

    Raises:
        ConfigError: a setting that production needs is missing.
    """
    if not settings.broker_url:
        raise ConfigError("WATCHSTEP_BROKER_URL is not set", "name the Redis, e.g. redis://redis:6379/0")
    if not settings.database_url:
        raise ConfigError(
            "WATCHSTEP_DATABASE_URL is not set", "name the PostgreSQL, e.g. postgresql://user@host/watchstep"
        )


def _shown(name: str, value: object) -> str:
    field = Settings.model_fields.get(name)
    secret = field is not None and "SecretStr" in str(field.annotation)
    return "a value that is not shown" if secret else redact(repr(value))


def settings_for(store: str, home: Path | None, **values: Any) -> Settings:
    """Settings of an embedded service for a store.

    Its home is the one that is named here or by WATCHSTEP_HOME; else in the store, where that is a folder.

    Raises:
        ConfigError: a value cannot be used.
    """
    if home is not None:
        values["home"] = home
    elif not os.environ.get("WATCHSTEP_HOME") and not checked_scheme(store):
        values["home"] = Path(store).expanduser().absolute() / ".watchstep"
    return load_settings(store=store, **values)


_log = logging.getLogger(__name__)

OF_OTHERS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "ATTEMPT",
        "CREDENTIALS",
        "FIRST_STEP",
        "IDLE_SECONDS",
        "JOBS",
        "LAUNCH",
        "LAUNCHED",
        "ON_STOP",
        "OVERHEAD_BUDGET",
        "PROBES",
        "PROJECT",
        "PROFILE",
        "PROFILES",
        "QUIET",
        "RECORDER_TOKEN",
        "RESTARTS",
        "RESUME_FROM",
        "RUN",
        "SERVICE",
        "SPILL",
        "STORE",
        "STORE_ID",
        "TOKEN",
    )
)
"""What the recorder and the command line read; docs/reference/settings.md has them too."""

OPEN_ENDED = (f"{PREFIX}RECEIVER_",)
"""Beginnings of names that the user chooses."""


def known_variables() -> frozenset[str]:
    """Every variable that something reads."""
    return OF_OTHERS | {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}


def unknown_variables(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Variables that nothing reads, and of each what was meant, or an empty text.

    Kubernetes' own, which it makes of a service's name, are not among them.
    """
    known = known_variables()
    for name in sorted(names):
        upper = name.upper()
        if (
            not upper.startswith(PREFIX)
            or upper in known
            or upper.startswith(OPEN_ENDED)
            or _of_kubernetes(upper)
        ):
            continue
        close = difflib.get_close_matches(upper, known, n=1, cutoff=0.75)
        yield name, close[0] if close else ""


def warn_of_unknown(names: Iterable[str]) -> None:
    """Say in the log which variables are not known."""
    for name, meant in unknown_variables(names):
        _log.warning(
            "%s is no setting, and nothing reads it%s", name, f"; did you mean {meant}?" if meant else ""
        )


def _of_kubernetes(name: str) -> bool:
    return name.endswith(
        ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_TCP_ADDR", "_TCP_PORT", "_TCP_PROTO")
    ) or ("_SERVICE_PORT_" in name)
