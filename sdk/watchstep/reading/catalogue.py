"""Which runs a store holds."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep import documents
from watchstep.errors import FormatError, NotFoundError
from watchstep.layout import RUN_DOCUMENT
from watchstep.reading.run_state import DAMAGED, state_of
from watchstep.store import Store


@dataclass(frozen=True)
class RunEntry:
    """A run, as far as its small documents tell.

    Attributes:
        project: its project.
        run: its id.
        created_ns: when it was made, nanoseconds since the epoch.
        state: as `watchstep.reading.run_state.state_of` tells it.
    """

    project: str
    run: str
    created_ns: int
    state: str


def find_runs(store: Store) -> list[RunEntry]:
    """The runs of a store, the newest first. Folders without a run's document are left out.

    Raises:
        StoreError: the store cannot be read.
    """
    found = []
    for project in store.folders():
        for run in store.folders(f"{project}/"):
            entry = _entry(store.child(f"{project}/{run}"), project, run)
            if entry is not None:
                found.append(entry)
    return sorted(found, key=lambda entry: (-entry.created_ns, entry.project, entry.run))


def _entry(store: Store, project: str, run: str) -> RunEntry | None:
    try:
        data = store.get(RUN_DOCUMENT, limit=documents.MAX_BYTES)
        document = documents.decode(documents.RunDocument, data, f"{project}/{run}")
    except NotFoundError:
        return None
    except FormatError:
        return RunEntry(project, run, 0, DAMAGED)
    return RunEntry(project, run, document.created_ns, state_of(store))
