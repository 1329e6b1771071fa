"""What is kept of local jobs, in one folder: how each began, where its log is, how it ended."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from watchstep.errors import NotFoundError
from watchstep.process_identity import ProcessIdentity
from watchstep_services.estimator.backend import JobStatus
from watchstep_services.estimator.errors import SubmissionRejectedError

FOLDER = "WATCHSTEP_JOBS"
_KEPT_SECONDS = 30 * 86400.0


def default_folder() -> Path:
    """Where records go when nothing else is said."""
    return Path(os.environ.get(FOLDER) or "~/.watchstep/jobs").expanduser().absolute()


@dataclass(frozen=True)
class Records:
    """A folder of records: ``PID-TICKS-BOOT.json`` for each job, and the same with ``.exit`` once it has ended."""

    folder: Path

    def new_log(self, name: str) -> Path:
        """A log of a job's own."""
        named = re.sub(r"[^a-zA-Z0-9._-]", "-", name)[:63] or "job"
        return self.folder / f"{named}-{secrets.token_hex(4)}.log"

    def exit_of(self, identity: ProcessIdentity) -> Path:
        """Where the keeper writes how a process ended."""
        return self.folder / f"{_stem(identity)}.exit"

    def prepare(self) -> None:
        """Make the folder, and forget what ended a month ago.

        Raises:
            SubmissionRejectedError: the folder cannot be used.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            oldest = time.time() - _KEPT_SECONDS
            for ended in self.folder.glob("*.exit"):
                if ended.stat().st_mtime < oldest:
                    self._forget(ended)
        except FileNotFoundError:
            pass  # another launcher forgot it just now
        except OSError as error:
            raise SubmissionRejectedError(
                f"jobs folder {self.folder}: cannot be used ({error.strerror})",
                f"name a folder that you may write to, by Local(folder=…) or {FOLDER}",
            ) from error

    def keep(self, identity: ProcessIdentity, log: Path) -> None:
        """Write down that a job began, before it can be seen to have ended.

        Raises:
            OSError: the folder cannot be written.
        """
        place = self._began(identity)
        partial = place.with_suffix(".partial")
        partial.write_text(json.dumps({"identity": asdict(identity), "log": str(log)}), encoding="utf-8")
        partial.replace(place)

    def is_kept(self, identity: ProcessIdentity) -> bool:
        """Whether a job was started with this folder."""
        return self._began(identity).exists()

    def log_of(self, identity: ProcessIdentity) -> str | None:
        """The log of a job that was started with this folder."""
        try:
            return str(json.loads(self._began(identity).read_text(encoding="utf-8"))["log"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def kept(self) -> Iterator[tuple[ProcessIdentity, Path]]:
        """The jobs of this folder that are not known to have ended, with their logs."""
        for place in sorted(self.folder.glob("*.json")):
            if place.with_suffix(".exit").exists():
                continue
            try:
                held = json.loads(place.read_text(encoding="utf-8"))
                yield ProcessIdentity(**held["identity"]), Path(held["log"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # forgotten just now, or none of ours

    def named(self, name: str) -> tuple[ProcessIdentity, Path] | None:
        """The job that was started under a name with this folder; None where none was: its keeper ends what is not written down."""
        for place in sorted(self.folder.glob("*.json")):
            try:
                held = json.loads(place.read_text(encoding="utf-8"))
                if Path(held["log"]).name.rpartition("-")[0] == name:
                    return ProcessIdentity(**held["identity"]), Path(held["log"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # forgotten just now, or none of ours
        return None

    def ending(self, identity: ProcessIdentity) -> JobStatus:
        """How a process that runs no more ended.

        The keeper writes it before it lets the process go, so it stands there unless the keeper died first.
        """
        for last_look in (False, True):
            try:
                return JobStatus("ended", int(self.exit_of(identity).read_text(encoding="ascii")))
            except FileNotFoundError:
                pass
            except ValueError:
                break
            if not last_look and _is_held(identity):
                return JobStatus("running", detail="it is ending")
        return JobStatus("vanished", detail="its keeper was ended before it: nobody knows its exit code")

    def _began(self, identity: ProcessIdentity) -> Path:
        return self.folder / f"{_stem(identity)}.json"

    def _forget(self, ended: Path) -> None:
        began = ended.with_suffix(".json")
        try:
            log = Path(json.loads(began.read_text(encoding="utf-8"))["log"])
            if log.parent == self.folder:
                log.unlink(missing_ok=True)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        began.unlink(missing_ok=True)
        ended.unlink(missing_ok=True)


def _is_held(identity: ProcessIdentity) -> bool:
    """Whether the process has ended and its keeper has not let it go yet."""
    try:
        return ProcessIdentity.of(identity.pid) == identity
    except NotFoundError:
        return False


def _stem(identity: ProcessIdentity) -> str:
    return f"{identity.pid}-{identity.start_ticks}-{identity.boot[:8]}"
