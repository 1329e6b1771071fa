"""What is written down of a launched job, so that another process can take it up: no secret is in it."""

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
from watchstep_launch.service_location import Judge


@dataclass(frozen=True)
class JobRecord:
    """A launched job.

    Attributes:
        project: of its run.
        run: its id.
        attempt: that it was launched as.
        store: where runs lie, as a URL.
        handle: the job.
        kind: of its backend.
        settings: of its backend.
        judge: the service; None where none judges it.
        relaunch: how it is launched again after a stop; None where it is not.
    """

    project: str
    run: str
    attempt: str
    store: str
    handle: JobHandle
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    judge: Judge | None = None
    relaunch: Relaunch | None = None

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        judge = None if self.judge is None else asdict(self.judge)
        named = {name: getattr(self, name) for name in ("project", "run", "attempt", "store", "kind")}
        relaunch = None if self.relaunch is None else self.relaunch.as_data()
        settings, handle = dict(self.settings), self.handle.as_data()
        return {**named, "settings": settings, "handle": handle, "judge": judge, "relaunch": relaunch}

    @classmethod
    def from_data(cls, data: Any) -> JobRecord:
        """Read what `as_data` gave.

        Raises:
            ConfigError: it has another form.
        """
        try:
            judge = Judge(**data["judge"]) if data.get("judge") else None
            project, run, attempt, store = (
                str(data[name]) for name in ("project", "run", "attempt", "store")
            )
            handle = JobHandle.from_data(data["handle"])
            relaunch = Relaunch.from_data(data["relaunch"]) if data.get("relaunch") else None
            kind, settings = str(data["kind"]), dict(data["settings"])
            return cls(project, run, attempt, store, handle, kind, settings, judge, relaunch)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"record of a job: cannot be read ({error!r})", "give what JobRecord.as_data gave"
            ) from error

    def save(self) -> Path:
        """Write it where `load` finds it; the newest launch of a run replaces an earlier one.

        Raises:
            ConfigError: the folder cannot be written.
        """
        place = place_of(self.project, self.run)
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = place.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(self.as_data(), indent=1), encoding="utf-8")
            partial.replace(place)
        except OSError as error:
            raise ConfigError(
                f"record {place}: cannot be written ({error.strerror})",
                "name another folder, by WATCHSTEP_JOBS",
            ) from error
        return place


def load(run: str, project: str = "default") -> JobRecord:
    """The newest launch of a run from this machine.

    Raises:
        NotFoundError: none is known here.
        ConfigError: its record cannot be read.
    """
    place = place_of(project, run)
    try:
        return JobRecord.from_data(json.loads(place.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise NotFoundError(
            f"run {project}/{run}: no launch of it is known here",
            f"look in {place.parent}, or bind the job with 'watchstep attach'",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"record {place}: cannot be read ({error})", "remove it, and attach to the job anew"
        ) from error


def place_of(project: str, run: str) -> Path:
    """The file that holds the newest launch of a run."""
    return default_folder() / "launched" / f"{check_name('project', project)}.{check_name('run', run)}.json"


def job_name(run: str) -> str:
    """A name that tells the run, and that no other launch has."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:40]
    return f"ws-{plain}-{secrets.token_hex(4)}" if plain else f"ws-{secrets.token_hex(4)}"
