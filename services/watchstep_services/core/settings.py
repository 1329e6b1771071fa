"""The service's settings: arguments, then ``WATCHSTEP_…`` environment variables, then defaults.

Settings of the embedded service follow from its store. Environment variables with the prefix that are not settings are
reported, because they are usually misspelt.
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
    """Settings of the service. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    home: Path = Field(
        Path("~/.watchstep"), description="The service's own folder: database and service.json."
    )
    store: str = Field("watchstep-runs", description="URL or folder that contains <project>/<run>/.")
    database_url: SecretStr = Field(
        SecretStr(""), description="SQLAlchemy URL; empty for SQLite in the home."
    )
    database_connect_seconds: float = Field(
        10.0, ge=0, description="Timeout for connecting to PostgreSQL; 0 for none."
    )
    database_dead_seconds: float = Field(
        60.0,
        ge=0,
        description="Time without an answer from its machine after which both sides close a connection to PostgreSQL; "
        "0 for the operating system's default.",
    )
    database_statement_seconds: float = Field(
        30.0, ge=0, description="Timeout of a statement in PostgreSQL; 0 for the server's default."
    )
    database_lock_seconds: float = Field(
        10.0,
        ge=0,
        description="Timeout for a statement's wait for a lock in PostgreSQL; 0 for the server's default.",
    )
    database_idle_seconds: float = Field(
        30.0,
        ge=0,
        description="Timeout of an open transaction without statements in PostgreSQL; 0 for the server's default.",
    )
    database_start_seconds: float = Field(
        60.0,
        ge=0,
        description="How long a process that starts waits for PostgreSQL if it does not answer; 0 to end at once.",
    )
    new_projects: Literal["on_first_run", "by_admins"] = Field(
        "on_first_run",
        description="Whether a first run creates its project, on the service's own store, or only admins do: `on_first_run` or "
        "`by_admins`.",
    )
    local_stores: Path | None = Field(
        None, description="Folder below which admins may register folders as stores; no folders if empty."
    )
    local_jobs: bool = Field(
        False,
        description="In production: whether jobs of a project that its first run creates may be processes of the workers' machine.",
    )
    broker_url: SecretStr = Field(SecretStr(""), description="Redis URL for Celery; only in production.")
    rules_file: Path | None = Field(
        None, description="The owner's rule file; the default rules are used without one."
    )
    receivers_file: Path | None = Field(
        None, description="The owner's file of receivers and routes, for all projects."
    )
    secret_key: SecretStr | None = Field(
        None,
        description="Key that encrypts secrets of receivers and addresses of webhooks. Of several, separated by commas, the first encrypts "
        "and each decrypts. Without it, `secret.key` in the home encrypts addresses if the database is SQLite there.",
    )
    allowed_addresses: str = Field(
        "",
        description="Addresses that receivers may use although they are not public: `10.1.0.0/16`, host names, `loopback`.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 for a free one.")
    public_url: str = Field("", description="URL at which people reach the API; host and port by default.")
    log: Literal["text", "json"] = Field("text", description="Format of the log: text, or JSON lines.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Lowest level that is logged."
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port for Prometheus, without a token; 0 for none. `/metrics` of the API requires a token.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address that the metrics port listens on.")
    requests_per_minute: int = Field(
        6000, ge=0, description="Requests per minute of one token, except recordings; 0 for no limit."
    )
    recordings_per_minute: int = Field(
        120_000, ge=0, description="Registrations and announcements per minute of one token; 0 for no limit."
    )
    failures_per_minute: int = Field(
        60,
        ge=0,
        description="Requests per minute of one address without a valid token, and for the API's document; 0 for no limit.",
    )
    access_log: bool = Field(False, description="Whether the API logs every request.")
    migrate: Literal["at_start", "never"] = Field(
        "at_start",
        description="Whether processes upgrade the database's schema: `at_start` or `never`.",
    )
    drain_seconds: float = Field(20.0, gt=0, description="Time for requests to finish after SIGTERM.")
    worker_processes: int = Field(2, ge=1, le=1024, description="Processes of one `watchstep worker`.")
    workers: int = Field(
        4,
        ge=1,
        le=64,
        description="Threads of the embedded service for evaluations of one project; one more evaluates runs of other projects.",
    )
    sweep_seconds: float = Field(1.0, gt=0, description="Interval of sweeps for work without a hint.")
    listing_seconds: float = Field(
        0.0,
        ge=0,
        description="Quiet time after which a run is listed; 0 for 1 in a folder and 30 in a bucket.",
    )
    lease_seconds: float = Field(30.0, gt=0, description="Duration of a lease on a run or an action.")
    gap_seconds: float = Field(60.0, ge=0, description="How long a missing segment is waited for.")
    allowed_lateness_seconds: float = Field(
        60.0, ge=0, description="How long a silent worker delays the watermark."
    )
    silent_seconds: float = Field(300.0, gt=0, description="Time without a sign after which a run is lost.")
    grace_seconds: float = Field(
        30.0,
        ge=0,
        description="Time between the stages of a stop (request, SIGTERM, SIGKILL): to receive it, to end a step, and to write.",
    )
    store_wait_seconds: float = Field(
        2.0,
        gt=0,
        description="How long a sweep or a stop waits for a bucket that does not answer before it continues without it, and a sweep "
        "for checks of new runs' SQL rules.",
    )
    retry_seconds: float = Field(
        1.0, gt=0, description="Time before the second try of an action; doubles with each try."
    )
    max_tries: int = Field(
        20,
        ge=1,
        description="Tries of a failing action before it is given up, over about an hour; a stop is retried while its attempt runs.",
    )
    webhook_seconds: float = Field(10.0, gt=0, description="Timeout of a receiver.")
    picture_seconds: float = Field(
        5.0,
        ge=0,
        description="How long a notification waits for the picture of its alert before it is sent without it; 0 for no pictures.",
    )
    picture_link_hours: float = Field(
        168.0,
        ge=0,
        le=8760,
        description="How long the links to pictures in notifications are valid, which need no token; 0 for no such links.",
    )
    query_seconds: float = Field(10.0, gt=0, description="Timeout of one query over statistics.")
    query_mb: int = Field(256, ge=16, description="Memory limit of one query over statistics, in MiB.")
    project_queries: int = Field(
        4, ge=1, description="Simultaneous queries of one project in a process; more are refused."
    )
    query_processes: int = Field(
        4,
        ge=1,
        le=64,
        description="Simultaneous SQL queries in a process, each in a process of its own; one project may use half of them.",
    )
    rule_processes: int = Field(
        8,
        ge=1,
        le=256,
        description="Processes for Python and SQL rules, for each process of the service; up to four more wait.",
    )
    rule_memory_mb: int = Field(
        2048,
        ge=16,
        description="Memory limit of one Python or SQL rule, in MiB; a rule that exceeds it is not evaluated.",
    )
    rule_seconds: float = Field(
        10.0,
        gt=0,
        description="Time limit of a run's Python and SQL rules together in one evaluation; the remaining rules are not evaluated.",
    )
    tensor_mb: int = Field(64, ge=1, description="Limit of a tensor in one answer, in MiB.")
    event_streams: int = Field(500, ge=1, description="Open event streams of a process; more are refused.")
    project_event_streams: int = Field(
        200, ge=1, description="Open event streams of one project in a process; more are refused."
    )
    token_event_streams: int = Field(
        50, ge=1, description="Open event streams of one token in a process; more are refused."
    )
    header_seconds: float = Field(
        10.0,
        gt=0,
        description="Timeout of a request's headers, from the connection or the first byte.",
    )
    body_seconds: float = Field(30.0, gt=0, description="Timeout of a request's body.")
    write_seconds: float = Field(
        20.0,
        gt=0,
        description="Time after which the connection of a client that reads nothing of an answer is closed.",
    )
    unread_mb: int = Field(
        256,
        ge=1,
        description="Memory for answers that clients are reading, in MiB per process; one project may use half of it, one token a "
        "quarter. More are refused.",
    )
    address_connections: int = Field(
        500,
        ge=0,
        description="Open connections of one address to a process; more are refused. 0 for no limit. "
        "Addresses in `FORWARDED_ALLOW_IPS` are proxies and not limited.",
    )
    python_rules: Demand = Field(
        DEFAULT,
        description="Rules that are programs: `refuse`, `full_only` (on machines that can sandbox them completely), or "
        "`allow_partial`.",
    )
    upkeep_seconds: float = Field(
        60.0, gt=0, description="Interval of the upkeep of ended runs (compaction and deletion)."
    )
    compact_after_seconds: float = Field(
        3600.0, ge=0, description="Time after its end when a run is compacted; 0 for never."
    )
    originals_seconds: float = Field(
        86400.0,
        ge=0,
        description="How long segments stay on the store after the compaction that replaced them.",
    )
    max_segments: int = Field(200, ge=1, description="Limit of segments that one evaluation reads.")
    max_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1,
        description="Limit of bytes that one evaluation reads, measured by the segments' size in memory.",
    )

    @property
    def home_folder(self) -> Path:
        """The home as an absolute path."""
        return self.home.expanduser().absolute()

    @property
    def resolved_database_url(self) -> str:
        """The database's URL; by default SQLite in the home."""
        return self.database_url.get_secret_value() or f"sqlite:///{self.home_folder / 'watchstep.sqlite'}"

    def listing_ns(self, *, local: bool) -> int:
        """Quiet time before a run's store is listed. It is longer for a bucket, where listings cost money."""
        return nanoseconds(self.listing_seconds or (1.0 if local else 30.0))


def nanoseconds(seconds: float) -> int:
    """Seconds as integer nanoseconds."""
    return round(seconds * NANOSECONDS)


def load_settings(**values: Any) -> Settings:
    """Load settings from arguments and the environment.

    Raises:
        ConfigError: a value is not valid; the message names the environment variable.
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
    """Check that settings are complete for production.

    Raises:
        ConfigError: a setting that production needs is missing.
    """
    if not settings.broker_url:
        raise ConfigError(
            "WATCHSTEP_BROKER_URL is not set", "give the URL of Redis, for example redis://redis:6379/0"
        )
    if not settings.database_url:
        raise ConfigError(
            "WATCHSTEP_DATABASE_URL is not set",
            "give the URL of PostgreSQL, for example postgresql://user@host/watchstep",
        )


def _shown(name: str, value: object) -> str:
    field = Settings.model_fields.get(name)
    secret = field is not None and "SecretStr" in str(field.annotation)
    return "a hidden value" if secret else redact(repr(value))


def settings_for(store: str, home: Path | None, **values: Any) -> Settings:
    """Load settings of an embedded service for a store.

    The home is the argument, or WATCHSTEP_HOME, or a folder in the store if the store is a folder.

    Raises:
        ConfigError: a value is not valid.
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
        "ALLOW_HTTP",
        "ATTEMPT",
        "AUDIT",
        "AUDIT_SEED",
        "AUDIT_STEPS",
        "CAPTURE",
        "CREDENTIALS",
        "FIRST_STEP",
        "IDLE_SECONDS",
        "JOBS",
        "LAUNCH",
        "LAUNCHED",
        "MIRROR",
        "MIRROR_SERIES",
        "EXPLAIN",
        "EXPLAINED_BUNDLE",
        "ON_NONFINITE",
        "ON_STOP",
        "OVERHEAD_BUDGET",
        "NEEDS",
        "PROJECT",
        "PROFILE",
        "PROFILES",
        "QUIET",
        "RECORDER_TOKEN",
        "PROGRAM_PROCESS",
        "RESTARTS",
        "RESUME_FROM",
        "RUN",
        "SERVICE",
        "SPILL",
        "STORE",
        "STORE_ID",
        "TRACE",
        "TENSORBOARD",
        "TOKEN",
    )
)
"""Variables of the recorder and the command line, which docs/reference/settings.md also lists."""

OPEN_ENDED = (f"{PREFIX}RECEIVER_",)
"""Prefixes of names that users choose."""


def known_variables() -> frozenset[str]:
    """All variables that Watchstep reads."""
    return OF_OTHERS | {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}


def unknown_variables(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Variables with Watchstep's prefix that it does not read, each with the closest known name or an empty text.

    Variables that Kubernetes creates from the name of a service are left out.
    """
    names_read = known_variables()
    for name in sorted(names):
        upper = name.upper()
        if (
            not upper.startswith(PREFIX)
            or upper in names_read
            or upper.startswith(OPEN_ENDED)
            or _of_kubernetes(upper)
        ):
            continue
        close = difflib.get_close_matches(upper, names_read, n=1, cutoff=0.75)
        yield name, close[0] if close else ""


def warn_of_unknown(names: Iterable[str]) -> None:
    """Log the unknown variables."""
    for name, close in unknown_variables(names):
        _log.warning(
            "%s is not a setting, and has no effect%s", name, f"; did you mean {close}?" if close else ""
        )


def _of_kubernetes(name: str) -> bool:
    return name.endswith(
        ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_TCP_ADDR", "_TCP_PORT", "_TCP_PROTO")
    ) or ("_SERVICE_PORT_" in name)
