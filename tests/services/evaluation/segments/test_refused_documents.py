"""Damaged documents: what is refused once is not read at every listing, and a listing reads so many bytes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.services.driving import Driven
from tests.services.recording import Recording
from watchstep.format import documents, layout
from watchstep.format.documents import AttemptDocument
from watchstep.store.store import Store
from watchstep_services.runs import discovery
from watchstep_services.service import listings
from watchstep_services.service.listings import RefusedDocuments


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


def test_a_damaged_document_is_read_once(
    driven_sqlite: Driven, folder_store: Store, reads: Counter[str]
) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven_sqlite.register()
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
    driven_sqlite: Driven, folder_store: Store, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven_sqlite.register()
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
