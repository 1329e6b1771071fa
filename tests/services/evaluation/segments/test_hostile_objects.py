"""Objects of a store that are hostile, damaged or refused."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.services.api.conftest import Api
from tests.services.driving import Driven
from tests.services.recording import PROJECT, nan_from
from watchstep.format import documents, layout
from watchstep.format.documents import AttemptDocument, Checkpoint, last_good
from watchstep.store.store import Store
from watchstep_services.db.models import Attempt, Project
from watchstep_services.runs import discovery
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.stops import StopStage
from watchstep_services.scheduler.polling import claim_polls, poll_run
from watchstep_services.service import listings
from watchstep_services.service.listings import RefusedDocuments

NAMES: tuple[Any, ...] = (
    "../../x",
    "",
    ".",
    "a/b",
    "a" * 300,
    "x\x00y",
    "\ud800",
    "-",
    "a b",
    "é",
    7,
    None,
    [],
    {},
)
NUMBERS: tuple[Any, ...] = (-1, 2**63, 10**400, 1e308, True, "1", None, [], {}, 0.5)
HUGE = 2**63 - 1


@dataclass(frozen=True)
class Kind:
    """A kind of object.

    Attributes:
        key: its keys, with a place for a number.
        valid: a valid document; empty for other objects.
    """

    key: str
    valid: dict[str, Any]


ATTEMPT = {
    "attempt": "x0",
    "started_ns": 2,
    "world_size": 1,
    "on_stop": "raise",
    "host": "",
    "config": {},
    "seeds": {},
}


END = {
    "worker": 0,
    "state": "failed",
    "last_step": 7,
    "ended_ns": 3,
    "segments": 1,
    "writer": "w9",
    "reason": "",
    "health": {},
}


RUN = {
    "project": PROJECT,
    "run": "run-1",
    "created_ns": 1,
    "rules": [{"rule": "stalled"}],
    "config": {},
    "environment": {},
    "schema": 3,
}


CONTROL = {
    "version": 9,
    "stop": {"attempt": "a1", "step": 3, "reason": "x", "event": ""},
    "tombstone": "",
    "snapshots": [],
    "cadence": {},
}


CHECKPOINT = {"path": "c.pt", "step": 3, "attempt": "a1", "worker": 0, "saved_ns": 1}


LAUNCH = {
    "attempt": "x0",
    "launched_ns": 1,
    "pid": 1,
    "start_ticks": 1,
    "boot": "b",
    "host": "h",
    "namespace": "n",
}


JOURNAL = {"schema": 3, "attempt": "a1", "number": 0, "evaluations": []}
MANIFEST = {"schema": 3, "generation": 1, "segments": [], "objects": []}


KINDS = (
    Kind("attempts/x{}.json", ATTEMPT),
    Kind("end/x{}/0.json", END),
    Kind("end/.x..{}/0.json", END),
    Kind("end/a1/{}7.json", END),
    Kind("launches/x{}.json", LAUNCH),
    Kind("control.json", CONTROL),
    Kind("saved/a1/{}-0.json", CHECKPOINT),
    Kind("stops/a1/{}/0-ready-99.json", {}),
    Kind("journal/a1/{:010}.json", JOURNAL),
    Kind("baselines/x{}.json", {"attempt": "x0", "runs": []}),
    Kind("references/x{}.json", {"attempt": "x0", "runs": []}),
    Kind("compacted/{}/manifest.json", MANIFEST),
    Kind("stats/x{}/node/w0/0000000000-0-7.arrow", {}),
    Kind("tensors/a1/0/{}-train.safetensors", {}),
    Kind("bundles/a1/0/{}-gate.safetensors", {}),
    Kind("traces/a1/0/{}-9000.zip", {}),
    Kind("samples/a1/0/{}-0-9000.samples", {}),
)


def _zipped(head: bytes, lines: bytes) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("trace.json", head)
        archive.writestr("operations.jsonl", lines)
    return buffer.getvalue()


def _headed(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


def hostile(kind: Kind) -> Iterator[bytes]:
    """Contents of objects of a kind."""
    yield b""
    yield b"\xff\xfe\x00garbage"
    yield b"null"
    yield b"[]"
    yield b"{}"
    yield b'"text"'
    yield b"9" * 5000
    yield b"NaN"
    yield b"[" * 100_000
    yield b'{"a":' * 100_000
    yield b"[" + b"[]," * 400_000 + b"[]]"
    yield _headed(b"{}", 2**64 - 1)
    yield _headed(b'{"w":{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,4]}}') + b"1234"
    yield _headed(b'{"__metadata__":[],"w":{"dtype":"?","shape":[-1],"data_offsets":[4,0]}}')
    yield _headed(b"[" * 50_000)
    yield _zipped(b"[" * 50_000, b"")
    yield _zipped(b'{"version":2,"sources":[],"stacks":{}}', b"[]\n")
    if not kind.valid:
        return
    yield json.dumps(kind.valid).encode()[:-7]
    for name, value in kind.valid.items():
        for other in (
            NAMES
            if isinstance(value, str)
            else NUMBERS
            if isinstance(value, int)
            else (None, 7, "x", [7], {"x": 7})
        ):
            yield json.dumps({**kind.valid, name: other}).encode()
    # With the largest numbers that a document may have.
    yield json.dumps(
        {name: HUGE if isinstance(value, int) else value for name, value in kind.valid.items()}
    ).encode()


def put(store: Store, kind: Kind) -> None:
    """Put the objects."""
    folder = Path(store.location)
    for count, content in enumerate(hostile(kind), 1):
        path = folder / kind.key.format(count)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.replace(b'"x0"', b'"x%d"' % count))
        if path == folder / kind.key:
            break  # one object only
    path = folder / kind.key.format(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        os.mkfifo(path)
    strange = os.fsencode(path.parent) + b"/\xff\n\x1b[31m" + b"z" * 100 + os.fsencode(path.suffix)
    Path(os.fsdecode(strange)).write_bytes(b"{}")


PAGES = (
    "", "/attempts", "/attempts/a1", "/alerts", "/overview", "/tensors", "/tensor?name=loss", "/series?tensor=loss&figure=mean", "/snapshots",
    "/traces", "/samples?step=7", "/events", "/actions", "/control", "/headroom", "/heatmap?figure=mean",
)  # fmt: skip


@pytest.mark.ci
def test_hostile_objects_damage_at_most_themselves(driven_sqlite: Driven) -> None:
    recording, run_id = driven_sqlite.record(last=3, started_ns=10)
    for kind in KINDS:
        put(recording.store, kind)
    checkpoint = Checkpoint("good.pt", 1, "a1", 0, 1)
    recording.store.put(checkpoint.key, checkpoint.encode())
    recording.write(1, 4, 7, nan_from(5))  # not announced: the listing finds it
    assert discover(driven_sqlite.service, run_id).complete
    driven_sqlite.settle(run_id)
    assert driven_sqlite.alerts(run_id)["non_finite_values"][0] == "firing"
    stop = driven_sqlite.actions(run_id)[0]
    assert driven_sqlite.dispatched(stop.id).stage == StopStage.REQUESTED, driven_sqlite.tries(stop.id)
    with driven_sqlite.service.database.read() as session:
        place = session.execute(select(Project).filter_by(name=PROJECT)).scalar_one().place
    assert last_good(driven_sqlite.service.stores.of_run(place, "run-1"), 5) == checkpoint
    api = Api.of(driven_sqlite)
    base = f"/v1/projects/{PROJECT}/runs/run-1"
    answers = {page: api.status("GET", f"{base}{page}") for page in PAGES}
    assert {page: status for page, status in answers.items() if status >= 500} == {}
    recording.end("failed", 7)
    assert discover(driven_sqlite.service, run_id).complete
    driven_sqlite.settle(run_id)
    for poll in claim_polls(driven_sqlite.service):
        poll_run(driven_sqlite.service, poll)
    ends = driven_sqlite.one(select(Attempt.ends).filter_by(run_id=run_id, attempt="a1"))
    assert ends["0"]["state"] == "failed"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each document is decoded."""
    counted: Counter[str] = Counter()
    decode = documents.decode

    def counting(kind: type[AttemptDocument], data: bytes, name: str) -> AttemptDocument:
        counted[name] += 1
        return decode(kind, data, name)

    monkeypatch.setattr(documents, "decode", counting)
    return counted


def test_a_damaged_document_is_read_once(driven_sqlite: Driven, reads: Counter[str]) -> None:
    recording, run_id = driven_sqlite.begin()
    key = layout.attempt_document("bad")
    recording.store.put(key, b'{"x": 1}')
    recording.store.put(layout.end_document("a1", 3), b"[]")
    for _ in range(3):
        discovery.discover(driven_sqlite.service, run_id)
        assert set(driven_sqlite.run(run_id).health["documents"]) == {key, layout.end_document("a1", 3)}
    assert (reads[key], reads[layout.end_document("a1", 3)]) == (1, 1)
    recording.store.put(key, documents.encode(AttemptDocument("bad", 5)))
    assert discovery.discover(driven_sqlite.service, run_id).fresh
    assert reads[key] == 2


def test_a_listing_reads_so_many_bytes_of_documents_and_the_next_reads_on(
    driven_sqlite: Driven, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven_sqlite.begin()
    discovery.discover(driven_sqlite.service, run_id)
    reads.clear()
    monkeypatch.setattr(discovery, "_DOCUMENT_BYTES", 1000)
    names = [f"b{number}" for number in range(6)]
    for name in names:
        recording.store.put(layout.attempt_document(name), b'{"x": "' + b"y" * 400 + b'"}')
    read = []
    for _ in range(4):
        discovery.discover(driven_sqlite.service, run_id)
        read.append(reads.total())
    assert read == [3, 6, 6, 6]


def test_so_many_are_remembered_and_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = RefusedDocuments(most=2)
    for name in ("a", "b", "c"):
        refused.put(1, name, 5, f"{name} is damaged")
    assert [refused.get(1, name, 5) for name in ("a", "b", "c")] == [None, "b is damaged", "c is damaged"]
    assert refused.get(1, "c", 6) is None
    assert refused.get(2, "c", 5) is None
    monkeypatch.setattr(listings, "AGAIN_SECONDS", 0.0)
    refused.put(1, "c", 5, "c is damaged")
    assert refused.get(1, "c", 5) is None
