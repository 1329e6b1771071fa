"""Samples that the steps of a run were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import select

from watchstep.errors import ConfigError, FormatError, NotFoundError
from watchstep.format.layout import SamplesKey, check_name
from watchstep.format.samples.samples import MAX_OBJECT_BYTES, decode_batch, payloads_of
from watchstep.reading.budget import PROCESS, ReadBudget
from watchstep.reading.samples import keys_by_attempt, list_samples
from watchstep.store.store import Store
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.queries.state import Queries, Querying
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.problems import documented
from watchstep_services.db.models import EventRow

router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/samples", tags=["samples"], responses=documented(502)
)

_MAX_BATCHES = 1000
_MAX_CHARACTERS = 300
_MAX_ANSWER = 8_000_000
"""Maximum of characters of all ids in an answer. A character takes up to four bytes, in several copies."""
_MEMORY_FACTOR = 2
"""Copies of an object's bytes in memory while it is read."""


class SampleBatchOutput(BaseModel):
    """The samples of one batch."""

    worker: int
    source: str = Field(description="Class of the dataset; empty for samples that the program named.")
    epoch: int = Field(description="Epoch of the data loader, from 0; -1: unknown.")
    number: int = Field(description="Number of the batch in the epoch, from 0; -1: unknown.")
    ids: list[Any] = Field(
        description="The first samples: indices, names, or what else identifies them. Long texts are shortened."
    )
    more: int = Field(description="Number of further samples of the batch.")


class StepSamples(BaseModel):
    """The samples that a step was trained on."""

    attempt: str = Field(description="Attempt; empty: no samples are on the store.")
    step: int
    batches: list[SampleBatchOutput] = Field(description="By worker, in the order of training.")
    more_batches: int = Field(
        description=f"Number of further batches; at most {_MAX_BATCHES} are returned, and fewer if their ids are long."
    )
    damaged: list[str] = Field(description="Objects that could not be read.")


@router.get("", summary="Get the samples of a step")
@permits("read")
def get_samples(
    project: str,
    run: str,
    queries: Querying,
    step: Annotated[int | None, Query(ge=0, lt=2**59, description="Step.")] = None,
    event: Annotated[
        Word | None,
        Query(max_length=128, description="Id of an event whose step is meant, in place of a step."),
    ] = None,
    attempt: Annotated[
        Word | None,
        Query(max_length=128, description="Attempt; default: the newest with samples of the step."),
    ] = None,
    worker: Annotated[int | None, Query(ge=0, lt=2**31, description="Only this worker.")] = None,
    limit: Annotated[int, Query(ge=0, le=1000, description="Maximum number of samples of each batch.")] = 100,
) -> StepSamples:
    """Return the samples that a step was trained on, as far as they are on the store.

    Recorders write them when something goes wrong, and at the end of an attempt.
    """
    if event is not None:
        step, attempt = _place_of(queries, project, run, event)
    if step is None:
        raise ConfigError("samples: no step", "name a step or an event")
    if attempt is not None:
        check_name("attempt", attempt)
    with queries.open_store(project, run) as store:
        return _read(store, queries.budget(), step, (attempt, worker), limit)


def _place_of(queries: Queries, project: str, run: str, event: str) -> tuple[int, str | None]:
    """Return the step of an event's evidence, or of the event, and its attempt."""
    with queries.service.database.read() as session:
        run_id = find_run(session, project, run).id
        row = session.execute(select(EventRow).filter_by(run_id=run_id, id=event)).scalar_one_or_none()
        data: Any = {} if row is None else row.event.get("data", {})
    step = data.get("evidence", {}).get("step", data.get("step"))
    if not isinstance(step, int) or step < 0:
        raise NotFoundError(
            f"event {event!r} of run {project}/{run}: {'not found' if row is None else 'it names no step'}",
            "list the events of the run to get their ids",
        )
    return step, data.get("attempt") or None


def _read(
    store: Store, budget: ReadBudget, step: int, place: tuple[str | None, int | None], limit: int
) -> StepSamples:
    """Read the samples of a step, of an attempt or the newest one that has any, and of a worker or all."""
    attempt, worker = place
    index = list_samples(store, budget.check)
    by_attempt = keys_by_attempt(
        key
        for key in index.keys
        if key.first <= step <= key.last
        and (attempt is None or key.attempt == attempt)
        and (worker is None or key.worker == worker)
    )
    # Numbers of records begin with the time.
    for chosen in sorted(by_attempt, key=lambda name: -max(key.seq for key in by_attempt[name])):
        reading = _Reading(store, budget, step, limit)
        reading.read(by_attempt[chosen])
        if reading.batches or reading.damaged:
            return StepSamples(
                attempt=chosen,
                step=step,
                batches=reading.batches,
                more_batches=reading.more_batches,
                damaged=reading.damaged,
            )
    return StepSamples(attempt="", step=step, batches=[], more_batches=0, damaged=[])


@dataclass
class _Reading:
    """Reads the samples of a step from the objects of an attempt. Batches beyond `_MAX_BATCHES` and `_MAX_ANSWER` are counted, and not decoded."""

    store: Store
    budget: ReadBudget
    step: int
    limit: int
    batches: list[SampleBatchOutput] = field(default_factory=list)
    more_batches: int = 0
    damaged: list[str] = field(default_factory=list)
    characters: int = 0

    def read(self, keys: Sequence[SamplesKey]) -> None:
        """Read the objects."""
        for key in keys:
            self.budget.check()
            try:
                size = self.store.size(key.path)
                if size > MAX_OBJECT_BYTES:
                    self.damaged.append(key.path)
                    continue
                with PROCESS.reserve(_MEMORY_FACTOR * size, self.budget, key.path):
                    self._add(key, self.store.get(key.path, limit=size))
            except NotFoundError:
                continue  # removed after listing
            except FormatError:
                self.damaged.append(key.path)

    def _add(self, key: SamplesKey, data: bytes) -> None:
        for payload in payloads_of(data, key.path, range(self.step, self.step + 1)):
            self.budget.check()
            if len(self.batches) >= _MAX_BATCHES or self.characters >= _MAX_ANSWER:
                self.more_batches += 1
                continue
            batch = decode_batch(payload, key.path, self.limit)
            ids = [_shortened(sample) for sample in batch.ids]
            self.characters += sum(map(_characters, ids))
            self.batches.append(
                SampleBatchOutput(
                    worker=key.worker,
                    source=batch.source,
                    epoch=batch.epoch,
                    number=batch.number,
                    ids=ids,
                    more=batch.left_out,
                )
            )


def _characters(sample: Any) -> int:
    """Return the approximate length of an id in the answer."""
    return len(sample) if isinstance(sample, str) else 20 if isinstance(sample, int) else _MAX_CHARACTERS


def _shortened(sample: Any) -> Any:
    """Return an id whose text is bounded: it is a recorder's."""
    if isinstance(sample, int) and -(2**53) < sample < 2**53:
        return sample
    text = sample if isinstance(sample, str) else str(sample)
    if len(text) <= _MAX_CHARACTERS:
        return sample if isinstance(sample, str | dict | tuple) else text
    return f"{text[:_MAX_CHARACTERS]}…"
