"""Object stores: a local folder, S3, GCS or Azure by URL, through obstore, behind one class.

A `WriteGate` ends the writes of a recording, including those of threads that may still wait in a request.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from watchstep.errors import (
    BadNameError,
    ConfigError,
    FormatError,
    NotFoundError,
    RecordingEndedError,
    StoreError,
)
from watchstep.platform.folders import absolute_path, usable_folders
from watchstep.store.errors import (
    PROVIDERS,
    FailedCall,
    Verb,
    is_denied,
    not_found,
    refusal_of_folder,
    translate,
)
from watchstep.store.local import (
    MARKER,
    StoreIdentity,
    create_file,
    descend,
    is_regular,
    opened_object,
    put_file,
    read_range,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from watchstep.store.cloud import S3Access


class WriteGate:
    """A gate that is open until a recording has ended. After that its stores write nothing. Thread-safe.

    A request that was sent before cannot be cancelled: each thread of the recording has at most one in progress, and the store may
    still execute it.
    """

    def __init__(self) -> None:
        self._closed = False

    def close(self) -> None:
        """Prevent further writes. This does not wait, and may be called again."""
        self._closed = True

    def check(self, name: str) -> None:
        """Check that the recording may still write.

        Args:
            name: Name of the object, for the message.

        Raises:
            RecordingEndedError: The recording has ended.
        """
        if self._closed:
            raise RecordingEndedError(
                f"{name} was not written, because the recording has ended",
                "'watchstep sync' uploads the remaining data",
            )


_PART = (
    5 * 1024 * 1024
)  # the minimum of S3; two at a time pass through a slow connection within a request's timeout
_MAX_PARTS = 9_000  # S3 accepts 10,000


@dataclass(frozen=True)
class ObjectEntry:
    """One object in a listing: its key, relative to the store, and its size in bytes."""

    key: str
    size: int


class Store:
    """Objects under one prefix. Keys are relative to it; objects are written atomically and never changed.

    Thread-safe; obstore releases the GIL while it waits.
    """

    def __init__(
        self,
        url: str,
        backend: Any,
        prefix: str = "",
        *,
        hides_missing: bool = False,
        identity: StoreIdentity | None = None,
        gate: WriteGate | None = None,
    ) -> None:
        self.url = url
        self._backend = backend
        self._prefix = prefix
        self._hides_missing = hides_missing
        self._identity = identity
        self._gate = gate

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        create: bool = False,
        access: S3Access | None = None,
        identity: StoreIdentity | None = None,
    ) -> Store:
        """Open the store at a URL or a local path, without a request.

        Args:
            url: ``s3://``, ``gs://``, ``az://``, ``file://`` or a path.
            create: Create a missing local folder, and its marker if an identity is passed.
            access: Access to a bucket on S3; by default from the environment.
            identity: Identity of a local store. If it is known, by this or an earlier process, the folder is not created, and must be the
                same store, now and whenever an object is written or not found.

        Raises:
            ConfigError: The URL is empty, its scheme is not one of these, or ``access`` is for another scheme.
            MissingStoreError: A local folder is missing, or is not the known store.
            StoreError: A local folder cannot be created.
        """
        text = os.fspath(url)
        scheme = checked_scheme(text)
        if scheme in PROVIDERS:
            from watchstep.store.cloud import cloud_backend

            hides = access is not None and access.hides_missing
            return cls(text.rstrip("/"), cloud_backend(text, scheme, access), hides_missing=hides)
        if scheme == "file":
            return cls._open_folder(_folder_of(text), identity, create=create)
        return cls._open_folder(absolute_path(text), identity, create=create)

    @classmethod
    def _open_folder(cls, folder: Path, identity: StoreIdentity | None, *, create: bool) -> Store:
        from obstore.store import LocalStore

        try:
            if identity is not None:
                identity.recall(folder)
            if create and not (identity is not None and identity.is_known):
                folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StoreError(
                f"store {folder}: cannot create the folder ({reason})",
                "name a folder that you may write to",
            ) from error
        if not folder.is_dir():
            raise (identity or StoreIdentity()).missing(folder)
        if identity is not None:
            identity.attach(folder, create=create)
        return cls(folder.as_uri(), LocalStore(folder), identity=identity)

    @property
    def is_local(self) -> bool:
        """Return whether the store is a folder on this machine."""
        return self.url.startswith("file:")

    @property
    def location(self) -> str:
        """The URL of this prefix, or the path for a local store. `Store.open` accepts both."""
        root = unquote(urlsplit(self.url).path) if self.is_local else self.url
        return f"{root}/{self._prefix}".rstrip("/")

    def child(self, prefix: str) -> Store:
        """Return the same store with a prefix below this one."""
        return self._view(f"{self._prefix}{prefix.rstrip('/')}/", self._gate)

    def sibling(self, name: str) -> Store:
        """Return the same store with another last part of its prefix: seen from a run, another run of its project.

        Args:
            name: A name that `watchstep.format.layout.check_name` accepts.

        Raises:
            BadNameError: The name could leave the prefix.
        """
        if not name or "/" in name or name in {".", ".."}:
            raise BadNameError(
                f"run name {name!r} cannot be used", "use the name of a run of the same project"
            )
        parent, _, _ = self._prefix.rstrip("/").rpartition("/")
        prefix = f"{parent}/" if parent else ""
        return self._view(f"{prefix}{name}/", self._gate)

    def gated(self, gate: WriteGate) -> Store:
        """Return the same store, which writes and deletes only while a gate is open."""
        return self._view(self._prefix, gate)

    def _view(self, prefix: str, gate: WriteGate | None) -> Store:
        return Store(
            self.url,
            self._backend,
            prefix,
            hides_missing=self._hides_missing,
            identity=self._identity,
            gate=gate,
        )

    def check_identity(self) -> None:
        """Check that a local store that was opened with an identity still exists and is the same.

        Raises:
            MissingStoreError: The store is missing, or another.
        """
        if self._identity is not None:
            self._identity.check()

    def put(self, key: str, data: bytes) -> None:
        """Write an object atomically, and replace an object of the same key.

        Raises:
            StoreError: The object could not be written; no part of it is visible.
        """
        import obstore

        with self._writing(key):
            if self._identity is None:
                obstore.put(self._backend, self._prefix + key, data)
                return
            with self._written_folder(self._identity, key) as (folder, name):
                put_file(folder, name, (data,))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only if the key does not exist. Returns False if it exists.

        Raises:
            StoreError: The object could not be written.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            with self._writing(key):
                if self._identity is not None:
                    with self._written_folder(self._identity, key) as (folder, name):
                        return create_file(folder, name, (data,))
                obstore.put(self._backend, self._prefix + key, data, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def create_in_parts(self, key: str, size: int, parts: Iterable[memoryview]) -> bool:
        """Write a large object without a copy, only if the key does not exist. Returns False if it exists.

        It becomes visible completely when the last part has arrived. Of two concurrent writers of one large object
        the later one wins. A killed process leaves parts that no listing shows; a bucket's lifecycle rule for
        incomplete uploads removes them.

        Args:
            key: Key relative to this store.
            size: Size of the object in bytes.
            parts: Its bytes in order; unchanged until this returns. An exception of the iterable stops the upload.

        Raises:
            StoreError: The object could not be written, or a part raised; no part of it is visible.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        part = max(_PART, -(-size // _MAX_PARTS))
        try:
            with self._writing(key):
                if self._identity is not None:
                    with self._written_folder(self._identity, key) as (folder, name):
                        return create_file(folder, name, parts)
                if size <= part:  # one request, which itself checks that the key does not exist
                    obstore.put(self._backend, self._prefix + key, b"".join(parts), mode="create")
                elif self._exists(key):
                    return False
                else:
                    chunks = iter(parts)
                    obstore.put(self._backend, self._prefix + key, chunks, chunk_size=part, max_concurrency=2)
        except AlreadyExistsError:
            return False
        return True

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        """Translate exceptions of the body.

        Raises:
            AlreadyExistsError: obstore's exception, unchanged.
            StoreError: Any other failure.
        """
        from obstore.exceptions import AlreadyExistsError

        self._check_gate(key)
        try:
            yield
        except (AlreadyExistsError, StoreError):
            raise
        except Exception as error:
            raise self._translated("write", key, error) from error

    def _check_gate(self, key: str) -> None:
        if self._gate is not None:
            self._gate.check(f"object {self._description(key)}")

    @contextlib.contextmanager
    def _written_folder(self, identity: StoreIdentity, key: str) -> Iterator[tuple[int, str]]:
        """Yield the folder of an object in a local store, created if missing, and the object's name in it.

        obstore would also create a missing store itself.

        Raises:
            MissingStoreError: The store is missing, or another.
            OSError: The folder cannot be created.
        """
        *parts, name = self._parts_of(key)
        with identity.opened() as root:
            folder = descend(root, parts, create=True)
            try:
                yield folder, name
            finally:
                os.close(folder)

    def _parts_of(self, key: str) -> list[str]:
        parts = (self._prefix + key).split("/")
        if any(part in {"", ".", ".."} or "\0" in part for part in parts):
            raise StoreError(
                f"object {self._description(key)} has an invalid key",
                "use names between single slashes, and no '..'",
            )
        return parts

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[str]:
        """Yield the path of an object in a folder for reading; translate exceptions of the body."""
        self._parts_of(key)
        try:
            yield self._path(key)
        except OSError as error:
            raise self._translated("read", key, error) from error

    def _exists(self, key: str) -> bool:
        try:
            self.size(key)
        except NotFoundError:
            return False
        return True

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Read a complete object.

        Args:
            key: Key relative to this store.
            limit: Maximum size in bytes. A larger object is rejected before memory is allocated.

        Raises:
            NotFoundError: The object does not exist.
            FormatError: The object exceeds the limit.
            StoreError: The object could not be read.
        """
        if self.is_local:
            with self._reading(key) as path, opened_object(path) as (file, size):
                if limit is None or size <= limit:
                    return read_range(file, 0, size)
            raise oversized(self._description(key), size, limit)
        import obstore

        try:
            response = obstore.get(self._backend, self._prefix + key)
            size = int(response.meta["size"])
            if limit is None or size <= limit:
                return bytes(response.bytes())
        except Exception as error:
            raise self._translated("read", key, error) from error
        raise oversized(self._description(key), size, limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read ``length`` bytes (at least 1) of an object from ``start``; fewer if the object ends before.

        Raises:
            NotFoundError: The object does not exist.
            StoreError: The object could not be read, or ends at ``start`` or before.
        """
        if self.is_local:
            with self._reading(key) as path, opened_object(path) as (file, size):
                if start < size:
                    return read_range(file, start, min(length, size - start))
            raise StoreError(
                f"store {self.url}: cannot read {key!r} ({size} bytes, no byte at {start})",
                "read it anew: it may have changed",
            )
        import obstore

        try:
            return bytes(obstore.get_range(self._backend, self._prefix + key, start=start, length=length))
        except Exception as error:
            raise self._translated("read", key, error) from error

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read several ranges (start, length) of an object at once. In a bucket, one request reads adjacent ranges.

        A range has fewer bytes if the object ends before.

        Raises:
            NotFoundError: The object does not exist.
            StoreError: The object could not be read.
        """
        if self.is_local:
            with self._reading(key) as path, opened_object(path) as (file, size):
                return [
                    memoryview(read_range(file, start, max(0, min(length, size - start))))
                    for start, length in ranges
                ]
        import obstore

        starts, lengths = [start for start, _ in ranges], [length for _, length in ranges]
        try:
            ranges_read = obstore.get_ranges(
                self._backend, self._prefix + key, starts=starts, lengths=lengths
            )
            return [memoryview(data) for data in ranges_read]
        except Exception as error:
            raise self._translated("read", key, error) from error

    def size(self, key: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            NotFoundError: The object does not exist.
            StoreError: The store is unreachable.
        """
        if self.is_local:
            with self._reading(key) as path:
                return size_of(path)
        import obstore

        try:
            return int(obstore.head(self._backend, self._prefix + key)["size"])
        except Exception as error:
            raise self._translated("read", key, error) from error

    def entries(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """Yield all objects with keys that start with the path segments of ``prefix``, in no order. Only regular files are included.

        Raises:
            StoreError: The store is unreachable.
        """
        import obstore

        skip = len(self._prefix)
        any_entry = False
        try:
            for batch in obstore.list(self._backend, (self._prefix + prefix) or None):
                for meta in batch:
                    if not self._prefix and meta["path"] == MARKER:
                        continue
                    if self.is_local and not meta["size"] and not is_regular(self._path_of(meta["path"])):
                        continue  # pipes, sockets and devices have no size
                    any_entry = True
                    yield ObjectEntry(str(meta["path"])[skip:], int(meta["size"]))
        except Exception as error:
            if self._is_below_a_file(prefix):
                return
            raise self._translated("list", prefix, error) from error
        if not any_entry:
            self.check_identity()

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the "folders" directly below a prefix, sorted. A name that cannot be part of a key is omitted and logged.

        Raises:
            StoreError: The store is unreachable.
        """
        import obstore

        try:
            listing = obstore.list_with_delimiter(self._backend, (self._prefix + prefix) or None)
        except obstore.exceptions.InvalidPathError as error:
            if not self.is_local:
                raise self._translated("list", prefix, error) from error
            return self._usable_folders(prefix)
        except Exception as error:
            if self._is_below_a_file(prefix):
                return []
            raise self._translated("list", prefix, error) from error
        if not listing["common_prefixes"]:
            self.check_identity()
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in listing["common_prefixes"])

    def changed_ns(self, prefix: str) -> int:
        """Return when objects directly below a prefix of a local store were last added or removed; 0 without objects.

        Nanoseconds since the epoch, by the clock of the machine that has the folder.
        """
        try:
            return Path(f"{self.location}/{prefix}").stat().st_mtime_ns
        except OSError:
            return 0

    def newest_ns(self, prefix: str = "") -> int:
        """Return when the newest object below a prefix was written, in nanoseconds since the epoch by the store's clock; 0 without objects.

        Raises:
            StoreError: The store is unreachable.
        """
        import obstore

        try:
            written = (
                meta["last_modified"].timestamp()
                for batch in obstore.list(self._backend, (self._prefix + prefix) or None)
                for meta in batch
            )
            return round(1e9 * max(written, default=0.0))
        except Exception as error:
            raise self._translated("list", prefix, error) from error

    def _usable_folders(self, prefix: str) -> list[str]:
        try:
            return usable_folders(f"{self.location}/{prefix}")
        except OSError as error:
            raise self._translated("list", prefix, error) from error

    def delete(self, key: str) -> None:
        """Remove an object. A missing object is not an error.

        Raises:
            StoreError: The store refused the request.
        """
        import obstore

        self._check_gate(key)
        self.check_identity()
        try:
            obstore.delete(self._backend, self._prefix + key)
        except Exception as error:
            translated = self._translated("delete", key, error)
            if not isinstance(translated, NotFoundError):
                raise translated from error

    def check_writable(self) -> None:
        """Write and remove a small object, so that an unusable store is reported before training starts.

        Raises:
            StoreError: The store refused; the message has its reason.
        """
        probe = f".watchstep-probe-{os.getpid()}"
        self.put(probe, b"")
        self.delete(probe)

    def _is_below_a_file(self, key: str) -> bool:
        """Return whether the key is below an object, which is impossible in a folder and does not occur in a bucket."""
        return self.is_local and refusal_of_folder(self._path(key), "list") == errno.ENOTDIR

    def _is_hidden(self, key: str, error: Exception) -> bool:
        """Return whether a refusal only means that the object does not exist, by listing its folder."""
        if not self._hides_missing or not is_denied(error):
            return False
        import obstore

        whole = self._prefix + key
        try:
            # Start just before it: the first page of names contains it, if it exists.
            listing = obstore.list(self._backend, whole.rpartition("/")[0] or None, offset=whole[:-1])
            return all(str(meta["path"]) != whole for meta in next(iter(listing), []))
        except Exception:  # noqa: BLE001 - listing is also refused: the refusal remains
            return False

    def _description(self, key: str) -> str:
        return f"{self.location}/{key}"

    def _path(self, key: str) -> str:
        return f"{self.location}/{key}".rstrip("/")

    def _path_of(self, whole: str) -> str:
        """Return the path in a folder of a key with its prefix."""
        return f"{unquote(urlsplit(self.url).path)}/{whole}"

    def _translated(self, verb: Verb, key: str, error: Exception) -> StoreError:
        self.check_identity()
        path = self._path(key) if self.is_local else None
        call = FailedCall(verb, key, self.url, self._description(key), path)
        if verb == "read" and self._is_hidden(key, error):
            return not_found(call)
        return translate(error, call)


def oversized(name: str, size: int, limit: int) -> FormatError:
    """Return the error for an object over a reader's limit."""
    return FormatError(
        f"object {name} has {size} bytes, over the limit of {limit}",
        "nothing that Watchstep writes is so large: remove the object",
    )


def checked_scheme(url: str) -> str:
    """Return the scheme of a store's URL; empty for a path.

    Raises:
        ConfigError: No store has this scheme.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise ConfigError(f"store {url[:200]!r} is not a URL ({error})", "remove brackets from it") from error
    if "\0" in unquote(url):
        raise ConfigError(f"store {url[:200]!r} contains a null character", "remove it")
    if not url or (scheme and scheme != "file" and scheme not in PROVIDERS):
        raise ConfigError(
            f"store {url!r} has unknown scheme {scheme!r}" if url else "store: no URL given",
            "use a path, file://, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        )
    return scheme


def _folder_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise ConfigError(f"store {url!r} has no absolute path", "use file:///absolute/path, or a plain path")
    return Path(unquote(parts.path))
