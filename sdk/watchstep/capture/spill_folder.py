"""The folder where encoded objects wait for a store that cannot be reached: its files, and who may touch them.

::

    <folder>/spill.json                        whose objects these are, and for which store
      lock                                     held by whoever adds or uploads
      <seq>-<place>                            a segment
      end.json                                 how the worker ended, written last

Files appear whole: under a temporary name, then renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from watchstep import documents
from watchstep.capture.identity import Identity
from watchstep.capture.node.notice import Doubt
from watchstep.capture.outgoing import Outgoing, Place
from watchstep.errors import BadNameError, FormatError
from watchstep.layout import SegmentKey, WriterId, check_name

ABOUT = "spill.json"
END = "end.json"
_LOCK = "lock"
_TEMPORARY = ".part-"
_FILE = re.compile(r"[0-9]{10}-(.+)")
_MEND = "remove the folder if nothing in it is wanted"


@dataclass(frozen=True)
class About:
    """Whose objects lie in a spill folder.

    Attributes:
        store_url: where they belong.
        identity: who recorded.
        run: to make the run with.
        attempt: to claim the attempt with.
        writer: what was claimed; None where the store could not be reached for that.
        base: the number of the block that is this writer's first: those before it were handed over to the node's writer.
            None where that depends on what became of those in doubt.
        written: where ``base`` is None, how many segments this writer has on the store.
        doubt: the oldest blocks here, where they may be on the store already.
    """

    store_url: str
    identity: Identity
    run: documents.RunDocument
    attempt: documents.AttemptDocument
    writer: WriterId | None = None
    base: int | None = 0
    written: int = 0
    doubt: Doubt | None = None

    def encode(self) -> bytes:
        """As a file."""
        return json.dumps(asdict(self), indent=1, default=str).encode()

    @classmethod
    def decode(cls, data: bytes, name: str) -> About:
        """Read what `encode` gave.

        Raises:
            FormatError: it is something else.
        """
        try:
            held: dict[str, Any] = json.loads(data)
            identity = Identity(**held["identity"])
            writer = WriterId(**held["writer"]) if held["writer"] is not None else None
            for kind, value in asdict(identity).items():
                if isinstance(value, str):
                    check_name(kind, value)
            return cls(
                str(held["store_url"]),
                identity,
                documents.decode(documents.RunDocument, json.dumps(held["run"]).encode(), name),
                documents.decode(documents.AttemptDocument, json.dumps(held["attempt"]).encode(), name),
                writer,
                None if held.get("base", 0) is None else int(held.get("base", 0)),
                int(held.get("written", 0)),
                _doubt(held["doubt"]) if held.get("doubt") else None,
            )
        except (ValueError, KeyError, TypeError, BadNameError) as error:
            raise FormatError(f"{name}: not of a spill folder ({error!r})", _MEND) from error


def _doubt(held: dict[str, Any]) -> Doubt:
    key = held["key"]
    writer = WriterId(**key["writer"])
    named = SegmentKey.parse(SegmentKey(writer, key["seq"], key["first"], key["last"]).path)
    return Doubt(named, str(held["token"]), tuple(map(int, held["numbers"])))


@dataclass(frozen=True)
class Spilled:
    """A segment that waits in the folder: what it is, and its bytes."""

    place: Place
    size: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.place.seq:010d}-{self.place.name}"


class SpillFolder:
    """One folder, locked as long as this object is open."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, root: Path, name: str, about: About) -> SpillFolder:
        """A new folder, for its owner alone.

        Raises:
            OSError: it cannot be made.
        """
        path = root / f"{name}-{secrets.token_hex(4)}"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = root.stat()
        if held.st_uid != os.getuid() and not held.st_mode & stat.S_ISVTX:
            # Who could put another folder in the place of ours.
            raise PermissionError(f"{root} belongs to another user")
        path.mkdir(mode=0o700)
        folder = cls._locked(path, create=True)
        assert folder is not None, "nobody else knows of it"
        try:
            folder.describe(about)
        except OSError:
            folder.remove()
            raise
        return folder

    @classmethod
    def take(cls, path: Path) -> SpillFolder | None:
        """A folder that is there; None while another process holds it, or where it is gone.

        Raises:
            OSError: it cannot be opened.
        """
        return cls._locked(path, create=False)

    @classmethod
    def _locked(cls, path: Path, *, create: bool) -> SpillFolder | None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            lock = os.open(path / _LOCK, flags, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == (path / _LOCK).stat().st_ino:
                return cls(path, lock)
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:  # a file system without locks
            os.close(lock)
            raise
        os.close(lock)
        return None

    def about(self) -> About:
        """Whose it is.

        Raises:
            FormatError: that cannot be told.
        """
        try:
            return About.decode((self.path / ABOUT).read_bytes(), str(self.path / ABOUT))
        except OSError as error:
            raise FormatError(f"{self.path / ABOUT}: cannot be read ({error})", _MEND) from error

    def describe(self, about: About) -> None:
        """Say whose it is; again once the writer is claimed, before anything is uploaded under its name.

        Raises:
            OSError: it cannot be written.
        """
        self._write(ABOUT, about.encode())

    def add(self, item: Outgoing) -> Spilled:
        """Write an object.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        held = Spilled(item.place, len(item.data))
        self._write(held.name, item.data)
        return held

    def add_end(self, end: documents.EndDocument) -> None:
        """Write how the worker ended.

        Raises:
            OSError: it cannot be written.
        """
        self._write(END, documents.encode(end))

    def end(self) -> documents.EndDocument | None:
        """How the worker ended; None where nobody has said.

        Raises:
            FormatError: the file holds something else.
        """
        try:
            data = (self.path / END).read_bytes()
        except FileNotFoundError:
            return None
        return documents.decode(documents.EndDocument, data, str(self.path / END))

    def entries(self) -> list[Spilled]:
        """What lies here, in order. Files of other names are left out."""
        found = []
        for entry in os.scandir(self.path):
            named = _FILE.fullmatch(entry.name)
            place = Place.parse(named[1]) if named else None
            if place is not None and entry.is_file(follow_symlinks=False):
                found.append(Spilled(place, entry.stat().st_size))
        return sorted(found, key=lambda held: held.place.seq)

    def read(self, held: Spilled) -> Outgoing:
        """An object.

        Raises:
            OSError: it cannot be read.
        """
        return Outgoing(held.place, (self.path / held.name).read_bytes())

    def drop(self, name: str) -> None:
        """Remove a file; a missing one is no error.

        Raises:
            OSError: it cannot be removed.
        """
        (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder with what Watchstep made in it, and let go of it. What cannot be removed stays."""
        try:
            for entry in list(os.scandir(self.path)):
                if entry.name.startswith(_TEMPORARY) or entry.name in {ABOUT, END}:
                    Path(entry.path).unlink(missing_ok=True)
            (self.path / _LOCK).unlink(missing_ok=True)
            self.path.rmdir()
        except OSError:
            pass  # something of the user's own lies there, or it is gone already
        self.let_go()

    def let_go(self) -> None:
        """Leave the folder to others."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _write(self, name: str, data: bytes) -> None:
        temporary = self.path / f"{_TEMPORARY}{name}"
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor
                file.write(data)
            temporary.replace(self.path / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
