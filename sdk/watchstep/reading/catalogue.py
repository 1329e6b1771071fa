"""Which runs a store holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from watchstep.errors import FormatError, MissingStoreError, NotFoundError, StoreError
from watchstep.format import documents
from watchstep.format.layout import RUN_DOCUMENT
from watchstep.platform.terminal_text import printable
from watchstep.reading.run_documents import DAMAGED, StoredState, get_document, read_state
from watchstep.store.store import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunEntry:
    """A run, as far as its small documents tell.

    Attributes:
        project: its project.
        run: its id.
        created_ns: when it was made, nanoseconds since the epoch.
        state: as `watchstep.reading.run_documents.StoredState` has it.
        damage: of a damaged run, which document cannot be read, and why.
    """

    project: str
    run: str
    created_ns: int
    state: str
    damage: str = ""


def find_runs(store: Store) -> list[RunEntry]:
    """The runs of a store, the newest first. Folders without a run's document are left out.

    A run with a document that cannot be read is damaged. A project whose folder cannot be listed is left out, and logged.

    Raises:
        StoreError: the store cannot be read.
    """
    found = []
    for project in store.folders():
        for run in _runs_of(store, project):
            entry = _entry(store.child(f"{project}/{run}"), project, run)
            if entry is not None:
                found.append(entry)
    return sorted(found, key=lambda entry: (-entry.created_ns, entry.project, entry.run))


def _runs_of(store: Store, project: str) -> list[str]:
    try:
        return store.folders(f"{project}/")
    except MissingStoreError:
        raise
    except StoreError as error:
        if not store.is_local:
            raise
        _log.warning("project %r is left out: %s", project, printable(error.what))
        return []


def _entry(store: Store, project: str, run: str) -> RunEntry | None:
    created_ns = 0
    try:
        data = get_document(store, RUN_DOCUMENT, documents.MAX_BYTES)
        created_ns = documents.decode(documents.RunDocument, data, RUN_DOCUMENT).created_ns
        found = read_state(store)
    except NotFoundError:
        return None
    except MissingStoreError:
        raise
    except FormatError as error:
        found = StoredState(DAMAGED, error.what)
    except StoreError as error:  # a folder in the run that cannot be listed
        if not store.is_local:
            raise
        found = StoredState(DAMAGED, error.what)
    return RunEntry(project, run, created_ns, found.state, found.damage)
