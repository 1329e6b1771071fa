"""Small documents of a run, read so that one that is damaged, oversized or no file at all fails no other.

Whoever may write to a store can put anything into a run: pipes, large objects, or millions of small ones. What is read of one kind of document
is bounded; what is over the bound is damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from watchstep import documents
from watchstep.documents import Document
from watchstep.errors import BadNameError, FormatError, MissingStoreError, NotFoundError, StoreError
from watchstep.layout import ATTEMPTS, ENDS, LAUNCHES, attempt_document, launch_document
from watchstep.store import Store

_MIB = 1024 * 1024
_BYTES_OF_ENTRY = 512
"""What each object of a listing counts for, besides its size: listing and opening it takes time, too."""


@dataclass(frozen=True)
class DocumentKind(Generic[Document]):
    """A kind of document, and how much of it is read.

    Attributes:
        kind: what it is decoded as.
        prefix: where it lies, relative to the run.
        max_bytes: the largest document that is read.
        total_bytes: how much of the documents of one prefix is read.
        key: the key that a document belongs under; None where it has several.
    """

    kind: type[Document]
    prefix: str
    max_bytes: int
    total_bytes: int
    key: Callable[[Document], str] | None = None


ATTEMPT = DocumentKind(
    documents.AttemptDocument, ATTEMPTS, 65536, 8 * _MIB, lambda read: attempt_document(read.attempt)
)
"""One has 200 bytes: 11,000 attempts are read."""

LAUNCH = DocumentKind(
    documents.LaunchDocument, LAUNCHES, 65536, 8 * _MIB, lambda read: launch_document(read.attempt)
)

END = DocumentKind(documents.EndDocument, ENDS, documents.MAX_BYTES, 128 * _MIB)
"""One has some kilobytes: those of 16,384 ranks are read."""


@dataclass
class FoundDocuments(Generic[Document]):
    """Documents below a prefix, and what is wrong with the others.

    Attributes:
        documents: those that can be read, in the order of the listing.
        damaged: key → why it cannot be read; a prefix for documents beyond what is read.
    """

    documents: list[Document] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)


def read_documents(store: Store, kind: DocumentKind[Document], prefix: str = "") -> FoundDocuments[Document]:
    """The documents of one kind.

    Args:
        store: the store as seen from the run's prefix.
        kind: which.
        prefix: only those below it; all of them where it is empty.

    Raises:
        StoreError: the store cannot be read.
    """
    found: FoundDocuments[Document] = FoundDocuments()
    left = kind.total_bytes
    for entry in store.entries(prefix or kind.prefix):
        left -= _BYTES_OF_ENTRY + (entry.size if entry.size <= kind.max_bytes else 0)
        if left < 0:
            found.damaged[prefix or kind.prefix] = (
                f"more than {kind.total_bytes // _MIB} MiB of documents: the rest is not read"
            )
            break
        try:
            found.documents.append(_read(store, kind, entry.key))
        except NotFoundError:
            continue  # removed since it was listed
        except (FormatError, BadNameError) as error:
            found.damaged[entry.key] = error.what
    return found


def _read(store: Store, kind: DocumentKind[Document], key: str) -> Document:
    """Raises as `get_document`, and BadNameError."""
    document = documents.decode(kind.kind, get_document(store, key, kind.max_bytes), key)
    if kind.key is not None and kind.key(document) != key:
        raise FormatError(f"{key}: the document of another attempt", "remove it, or give it its own name")
    return document


def get_document(store: Store, key: str, limit: int) -> bytes:
    """The bytes of one document. In a folder, an object that cannot be read is damaged, for the store itself answers.

    Raises:
        NotFoundError: there is none.
        FormatError: it is over the limit, no regular file, or not readable for this user.
        StoreError: the store does not answer.
    """
    try:
        return store.get(key, limit=limit)
    except (NotFoundError, MissingStoreError):
        raise
    except StoreError as error:
        if not store.is_local:
            raise
        raise FormatError(error.what, error.mend) from error
