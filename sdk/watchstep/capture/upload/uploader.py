"""The uploader: writes the claim first, then the objects of the backlog in order, with pauses after a failure."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep.capture.health import RecorderHealth
from watchstep.capture.stop.control_reader import ControlReader
from watchstep.capture.upload.access import Access
from watchstep.capture.upload.backlog import Backlog
from watchstep.capture.upload.claims import claim_attempt, restore_documents
from watchstep.capture.upload.merging import settle
from watchstep.capture.upload.outgoing import Outgoing
from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format import documents
from watchstep.format.layout import WriterId, end_document
from watchstep.store.store import Store


@dataclass(frozen=True)
class UploadContext:
    """The way to the store and the service, what waits for it, and where is told how it went."""

    access: Access
    backlog: Backlog
    control: ControlReader
    health: RecorderHealth


class Uploader:
    """Writes what this process recorded under a writer of its own. On the writer's thread."""

    def __init__(self, means: UploadContext) -> None:
        self._access = means.access
        self._backlog = means.backlog
        self._control = means.control
        self._health = means.health
        self._writer: WriterId | None = None
        self._end_written = False
        self.written = 0
        """How many segments this writer has on the store."""

    @property
    def claimed(self) -> tuple[Store, str] | None:
        """The store and the attempt; None before the claim."""
        store, writer = self._access.store, self._writer
        return (store, writer.attempt) if store is not None and writer is not None else None

    @property
    def account(self) -> tuple[str, int]:
        """The writer's name, empty before the claim, and how many segments it has when all is written."""
        return (self._writer.writer if self._writer else "", self._backlog.segments - self._backlog.base)

    @property
    def writers(self) -> int:
        """How many write beside each other in this attempt."""
        return self._access.target.identity.world_size

    @property
    def patience(self) -> float:
        """For how many seconds nothing needs to be looked at."""
        return float("inf")

    @property
    def asks(self) -> bool:
        """Nobody asks for blocks: they are made at an interval."""
        return False

    @property
    def failing_for(self) -> float | None:
        """For how many seconds the store has refused; None where it does not."""
        return self._access.failing_for

    @property
    def end_written(self) -> bool:
        """Whether how the worker ended lies on the store."""
        return self._end_written

    def hurry(self) -> None:
        """The process is about to end: try at once, and often."""
        self._access.hurry()

    def hear(self) -> bool:
        """Nobody says anything: whoever woke the writer wants it to write."""
        return True

    def turn(self, *, flush: bool = True) -> None:  # noqa: ARG002 - it writes whatever is there
        """Claim, upload what waits, look at the control document. The first refusal ends the turn.

        So that sequence numbers never arrive out of order.
        """
        if not self._access.ready:
            return
        try:
            target, store = self._access.target, self._access.open()
            before, writer = self._writer, self._claimed(store)
            store = store if before is not None else self._access.change_to(writer.attempt)
            self._control.verify(store)
            self._settle(store)
            if not self._backlog.empty:
                restore_documents(store, target.run, target.attempt, writer.attempt, self._health)
            while (head := self._backlog.head()) is not None:
                self._write(store, head, writer)
                self._access.advanced()
            self._access.done()
        except StoreError as error:
            self._access.failed(error)
        if self.claimed is not None and self._access.store is not None:
            self._control.refresh(self._access.store)

    def release(self) -> None:
        """This process uploads nothing more. It has nothing that is not in the backlog."""

    def leave(self) -> None:
        """All is written. Nobody waits for this process."""

    def forget(self) -> None:
        """This is a forked child. Nothing here is open."""

    def _claimed(self, store: Store) -> WriterId:
        if self._writer is None:
            target = self._access.target
            self._access.warn_of_reuse(store)
            writer = claim_attempt(
                store, target.run, target.attempt, target.identity, others=target.open_attempt
            )
            self._backlog.claimed(writer)
            self._control.attempt = writer.attempt
            self._writer = writer
        return self._writer

    def _settle(self, store: Store) -> None:
        """What the node's writer may have written is looked at before anything is written again."""
        doubt = self._backlog.doubt
        contained: tuple[int, ...] = ()
        if doubt is not None:
            contained = settle(store, doubt, self._backlog.doubted()).get(doubt.token, ())
        self._backlog.settled(contained)

    def _write(self, store: Store, item: Outgoing, writer: WriterId) -> None:
        key = item.place.key(writer, self._backlog.base)
        lies = write_whole(store, key.path, item.data)
        if not self._backlog.remove(item):
            return
        self.written = key.seq + 1
        if not lies:
            self._health.count("overwritten_names")
            self._health.count("dropped_rows", item.place.rows)
            return
        self._health.count("objects")
        self._health.count("bytes", len(item.data))
        self._health.count("rows", item.place.rows)
        self._access.announce(key)

    def write_end(self, end: documents.EndDocument) -> None:
        """Write how the worker ended, after everything else."""
        if self._writer is None or self._access.store is None:
            return
        try:
            put_end(self._access.store, self._writer.attempt, end)
            self._end_written = True
        except StoreError as error:
            self._access.failed(error)


def write_whole(store: Store, path: str, data: bytes) -> bool:
    """Write an object that may lie there already, for the answer to an earlier try was lost.

    Returns:
        Whether it lies there; False where another object has its name.

    Raises:
        StoreError: the store refused.
    """
    if store.create(path, data):
        return True
    try:
        return store.get(path, limit=len(data)) == data
    except FormatError:  # larger
        return False


def put_end(store: Store, attempt: str, end: documents.EndDocument) -> None:
    """Write how a worker ended, unless a later process of the same rank has said so.

    Raises:
        StoreError: the store refused.
    """
    key = end_document(attempt, end.worker)
    try:
        if store.create(key, documents.encode(end)):
            return
        there = documents.decode(documents.EndDocument, store.get(key, limit=documents.MAX_BYTES), key)
        if there.ended_ns >= end.ended_ns:
            return
    except (NotFoundError, FormatError):
        pass  # removed meanwhile, or none of ours: write it
    store.put(key, documents.encode(end))
