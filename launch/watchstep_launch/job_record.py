"""The record of a launched job, by which another process can find it. It contains no secret."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import check_name
from watchstep.platform.process import default_folder
from watchstep_launch.backend import JobHandle
from watchstep_launch.relaunch import Relaunch
from watchstep_launch.service_location import ServiceReference


@dataclass(frozen=True)
class JobRecord:
    """A launched job.

    Attributes:
        project: the run's project.
        run: the run's id.
        attempt: the attempt that it was launched as.
        store: URL of the store.
        handle: the job.
        kind: kind of its backend.
        settings: settings of its backend.
        service: the service that evaluates the run; None if there is none.
        relaunch: how it is launched again after a stop; None if it is not.
    """

    project: str
    run: str
    attempt: str
    store: str
    handle: JobHandle
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    service: ServiceReference | None = None
    relaunch: Relaunch | None = None

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        service = None if self.service is None else asdict(self.service)
        fields = {name: getattr(self, name) for name in ("project", "run", "attempt", "store", "kind")}
        relaunch = None if self.relaunch is None else self.relaunch.as_data()
        settings, handle = dict(self.settings), self.handle.as_data()
        return {**fields, "settings": settings, "handle": handle, "judge": service, "relaunch": relaunch}

    @classmethod
    def from_data(cls, data: Any) -> JobRecord:
        """Parse the result of `as_data`.

        Raises:
            ConfigError: the data has another form.
        """
        try:
            service = ServiceReference(**data["judge"]) if data.get("judge") else None
            project, run, attempt, store = (
                str(data[name]) for name in ("project", "run", "attempt", "store")
            )
            handle = JobHandle.from_data(data["handle"])
            relaunch = Relaunch.from_data(data["relaunch"]) if data.get("relaunch") else None
            kind, settings = str(data["kind"]), dict(data["settings"])
            return cls(project, run, attempt, store, handle, kind, settings, service, relaunch)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the job record cannot be parsed ({error!r})", "pass the result of JobRecord.as_data"
            ) from error

    def save(self) -> Path:
        """Save it for `load`. The newest launch of a run replaces an earlier one.

        Raises:
            ConfigError: the folder cannot be written.
        """
        path = record_path(self.project, self.run)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(self.as_data(), indent=1), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise ConfigError(
                f"record {path}: cannot be written ({error.strerror})",
                "set WATCHSTEP_JOBS to another folder",
            ) from error
        return path


def load(run: str, project: str = "default") -> JobRecord:
    """Return the newest launch of a run from this machine.

    Raises:
        NotFoundError: no launch is known here.
        ConfigError: the record cannot be read.
    """
    path = record_path(project, run)
    try:
        return JobRecord.from_data(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise NotFoundError(
            f"run {project}/{run}: no launch is known on this machine",
            f"look in {path.parent}, or bind the job with 'watchstep attach'",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"record {path}: cannot be read ({error})", "remove it, and attach to the job again"
        ) from error


def record_path(project: str, run: str) -> Path:
    """Return the file for the newest launch of a run."""
    return default_folder() / "launched" / f"{check_name('project', project)}.{check_name('run', run)}.json"


def job_name(run: str) -> str:
    """Return a unique job name that includes the run's id."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:40]
    return f"ws-{plain}-{secrets.token_hex(4)}" if plain else f"ws-{secrets.token_hex(4)}"
