"""JSON documents on a store: their bounds, and notes about checkpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import traced_memory
from tests.services.jobs import eventually
from watchstep import Hook
from watchstep.capture import checkpoint_notes
from watchstep.capture.checkpoint_notes import CheckpointNotes
from watchstep.capture.health import RecorderHealth
from watchstep.errors import FormatError, StoreError
from watchstep.format import documents
from watchstep.format.documents import (
    AttemptDocument,
    Checkpoint,
    EndDocument,
    OversizedJsonError,
    RunDocument,
    find_checkpoints,
    last_good,
    memory_needed,
    parse_json,
)
from watchstep.format.layout import CHECKPOINTS, SCHEMA_VERSION
from watchstep.store.store import Store

# Documents


RUN = RunDocument("vision", "r1", 5, ({"rule": "nan_or_inf"},), {"every": 3})
ATTEMPT = AttemptDocument(
    "a1", 7, world_size=8, on_stop="raise", host="node0", environment={"python": "3.11"}
)
END = EndDocument(3, "failed", 120, 9, 4, "w3", "ValueError: no", {"dropped": 2})
ALL = (RUN, ATTEMPT, END)


@pytest.mark.parametrize("document", ALL)
def test_a_document_reads_back(document: Any) -> None:
    assert documents.decode(type(document), documents.encode(document), "d") == document


@pytest.mark.parametrize("document", ALL)
def test_keys_of_later_versions_are_omitted(document: Any) -> None:
    data = json.loads(documents.encode(document)) | {"later": 1}
    assert documents.decode(type(document), json.dumps(data).encode(), "d") == document


def test_what_has_a_default_may_be_missing() -> None:
    data = b'{"project": "p", "run": "r", "created_ns": 1}'
    assert documents.decode(RunDocument, data, "d") == RunDocument("p", "r", 1)


def test_values_that_are_not_json_are_retained_as_text() -> None:
    document = RunDocument("p", "r", 1, config={"dtype": complex(1, 2)})
    assert documents.decode(RunDocument, documents.encode(document), "d").config == {"dtype": "(1+2j)"}


@pytest.mark.parametrize(
    ("schema", "hint"),
    [
        (SCHEMA_VERSION + 1, "read the run with a newer watchstep"),
        (SCHEMA_VERSION - 1, "read the run with the version that recorded it"),
    ],
)
def test_another_schema_is_refused_with_its_own_hint(schema: int, hint: str) -> None:
    data = json.loads(documents.encode(RUN)) | {"schema": schema}
    with pytest.raises(FormatError, match=rf"p/r/run.json: schema {schema}, .*\n  hint: {hint}"):
        documents.decode(RunDocument, json.dumps(data).encode(), "p/r/run.json")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"3", b"[]", b"{}", b'"schema"', b"[" * 50_000])
@pytest.mark.parametrize("kind", [RunDocument, AttemptDocument, EndDocument])
def test_other_bytes_are_refused(kind: type[RunDocument], data: bytes) -> None:
    with pytest.raises(FormatError, match=r"d: not a document of this kind .*\n  hint: "):
        documents.decode(kind, data, "d")


@pytest.mark.parametrize(
    ("document", "lie"),
    [
        (RUN, {"project": 3}),
        (RUN, {"created_ns": 1.5}),
        (RUN, {"created_ns": 2**63}),
        (RUN, {"created_ns": True}),
        (RUN, {"schema": float("inf")}),
        (RUN, {"schema": "1"}),
        (RUN, {"rules": 3}),
        (RUN, {"rules": ["nan_or_inf"]}),
        (RUN, {"config": []}),
        (ATTEMPT, {"environment": {"python": 3}}),
        (ATTEMPT, {"world_size": None}),
        (ATTEMPT, {"on_stop": "explode"}),
        (ATTEMPT, {"on_stop": ["raise"]}),
        (END, {"state": "gone"}),
        (END, {"segments": "4"}),
        (END, {"health": "fine"}),
    ],
)
def test_a_value_of_another_type_is_refused(document: Any, lie: dict[str, Any]) -> None:
    data = json.loads(documents.encode(document)) | lie
    with pytest.raises(FormatError, match="not a document of this kind"):
        documents.decode(type(document), json.dumps(data).encode(), "d")


@pytest.mark.parametrize("levels", [62, 63, 64, 300, 900])
def test_deeply_nested_documents_are_refused(levels: int) -> None:
    """The document is the first level, and its config the second one."""
    inner = "1"
    for level in range(levels - 1):
        inner = f'{{"a": {inner}}}' if level % 2 else f"[{inner}]"
    data = f'{{"project": "p", "run": "r", "created_ns": 1, "config": {{"a": {inner}}}}}'.encode()
    if levels + 1 <= 64:
        assert json.loads(data)["config"] == documents.decode(RunDocument, data, "d").config
    else:
        with pytest.raises(FormatError, match="nested deeper than 64 levels"):
            documents.decode(RunDocument, data, "d")


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.none(), max_size=1)
)


@given(st.sampled_from(ALL), st.data())
def test_any_json_is_read_or_refused(document: Any, data: st.DataObject) -> None:
    content = json.loads(documents.encode(document))
    content |= data.draw(st.dictionaries(st.sampled_from(sorted(content)), values, max_size=3))
    try:
        read = documents.decode(type(document), json.dumps(content).encode(), "d")
    except FormatError:
        return
    assert documents.decode(type(read), documents.encode(read), "d") == read


# Bounds


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(document=DOCUMENTS, ascii_only=st.booleans())
def test_what_fits_is_parsed(document: object, *, ascii_only: bool) -> None:
    data = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert parse_json(data, memory_needed(data)) == document
    with pytest.raises(OversizedJsonError, match="a JSON text of"):
        parse_json(data, memory_needed(data) - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"[]," * 100_000 + b"[]]",
        b"[" + b"{}," * 100_000 + b"{}]",
        b"[" + b'{"a":1},' * 100_000 + b"{}]",
        b"{" + b",".join(b'"key%d":%d' % (number, number + 1000) for number in range(100_000)) + b"}",
        b"[" + b"1000," * 100_000 + b"1]",
        b"[" + b"1.5," * 100_000 + b"1]",
        b"[" + b",".join(b'"%07d"' % number for number in range(100_000)) + b"]",
        b'["' + b"a" * 1_000_000 + "\U0001f600".encode() + b'"]',
        b'["' + b"a" * 1_000_000 + b'\\ud83d\\ude00"]',
    ],
    ids=["lists", "objects", "pairs", "keys", "integers", "floats", "strings", "wide", "escaped"],
)
def test_no_text_takes_more_than_is_counted(data: bytes) -> None:
    with traced_memory() as memory:
        parsed = json.loads(data)
    assert parsed
    assert memory.peak <= memory_needed(data) < 6 * memory.peak


@pytest.mark.parametrize("text", [r"\ud800", r"\ude00", r"\ud83d\ude00\ude00"])
def test_long_texts_with_lone_surrogates_are_refused(text: str) -> None:
    """A second pass over sixteen megabytes would keep all other threads waiting for a second."""
    long = b'["' + b"a" * 2**20 + b'","' + text.encode() + b'"]'
    with pytest.raises(ValueError, match="lone surrogate"):
        parse_json(long, 2**30)
    paired = b'["' + b"a" * 2**20 + rb'","\ud83d\ude00"]'
    assert parse_json(paired, 2**30)[1] == "\U0001f600"


def test_lone_surrogates_become_question_marks() -> None:
    text = rb'{"reason": "no file \udce9", "face": "\uD83D\uDE00", "nan": NaN, "n": [1, 2.5]}'
    parsed = parse_json(text, 10_000)
    assert parsed["reason"] == "no file ?"
    assert parsed["face"] == "\U0001f600"
    assert parsed["n"] == [1, 2.5]
    json.dumps(parsed, ensure_ascii=False).encode()


# Checkpoints


SECOND = 1_000_000_000


def saved(step: int, attempt: str = "a1", at: int | None = None, worker: int = 0) -> Checkpoint:
    return Checkpoint(f"/checkpoints/{attempt}-{step}.pt", step, attempt, worker, step if at is None else at)


def put(store: Store, *checkpoints: Checkpoint) -> None:
    for checkpoint in checkpoints:
        store.put(checkpoint.key, checkpoint.encode())


@pytest.mark.ci
def test_a_hook_notes_what_the_program_saved(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r", project="p")
    for step in range(5):
        hook.log(loss=1.0)
        hook.step()
        if step % 2 == 0:
            hook.checkpoint_saved(tmp_path / f"step-{step}.pt")
    hook.checkpoint_saved("s3://elsewhere/last.pt", step=4)
    assert hook.protected_checkpoints() >= {str(tmp_path / "step-2.pt"), "s3://elsewhere/last.pt"}
    hook.close()
    found = find_checkpoints(Store.open(tmp_path).child("p/r/"))
    assert [(checkpoint.path, checkpoint.step) for checkpoint in found] == [
        (str(tmp_path / f"step-{step}.pt"), step) for step in (0, 2, 4)
    ]  # a step has one note of each worker: the first
    assert hook.health["faults"] == {}


def test_the_last_good_one_was_saved_before_the_bad_step(folder_store: Store) -> None:
    assert last_good(folder_store) is None
    put(folder_store, saved(10), saved(20), saved(30), saved(20, "a2", at=99))
    assert last_good(folder_store) == saved(30)
    assert last_good(folder_store, 30) == saved(20, "a2", at=99)
    assert last_good(folder_store, 11) == saved(10)
    assert last_good(folder_store, 10) is None
    folder_store.put(f"{CHECKPOINTS}a1/25-0.json", b"no json")
    folder_store.put(f"{CHECKPOINTS}a1/strange", b"")
    assert last_good(folder_store, 21) == saved(20, "a2", at=99)
    assert len(find_checkpoints(folder_store)) == 4


def test_of_many_checkpoints_of_a_step_some_are_read(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    get = folder_store.get

    def noted(path: str, **limits: Any) -> bytes:
        read.append(path)
        return get(path, **limits)

    monkeypatch.setattr(documents, "_MOST_OF_STEP", 5)
    monkeypatch.setattr(folder_store, "get", noted)
    put(folder_store, *(saved(20, worker=worker) for worker in range(9)), saved(10))
    found = last_good(folder_store)
    assert found is not None
    assert found.step == 20
    assert len(read) == 5


@pytest.mark.parametrize("other", [saved(3), Checkpoint("p" * 5000, 2, "a1", 0, 2)])
def test_a_checkpoint_of_another_name_or_with_a_long_path_is_none(other: Checkpoint) -> None:
    """One object under many names would be read as many checkpoints."""
    with pytest.raises(FormatError, match="contains that of"):
        Checkpoint.decode(other.encode(), saved(2).key)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"path": "x", "step": -1}', b"[" * 100_000])
def test_what_is_no_note_is_reported(data: bytes) -> None:
    with pytest.raises(FormatError):
        Checkpoint.decode(data, "k")


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40), st.integers(0, 120), st.data())
def test_the_last_good_checkpoint_is_protected_until_it_can_have_been_judged(
    gaps: list[int], late: int, data: st.DataObject
) -> None:
    """Whenever a step turns bad, and for as long as judging it may take, the newest checkpoint before it is protected."""
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    bad_at = data.draw(st.integers(times[0], times[-1] + 1000))
    good = max(time for time in times if time <= bad_at)
    now = bad_at + late
    notes = CheckpointNotes(_no_store, RecorderHealth())
    notes._saved = [saved(index, at=time * SECOND) for index, time in enumerate(times) if time <= now]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now * SECOND)
        protected = notes.protected()
    assert {
        checkpoint.path for checkpoint in notes._saved if checkpoint.saved_ns == good * SECOND
    } & protected


def test_a_store_that_does_not_answer_is_tried_again(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_notes, "_FIRST_PAUSE", 0.001)
    health, tries = RecorderHealth(), []

    def opened() -> Store:
        tries.append(1)
        if len(tries) < 3:
            raise StoreError("store: away", "wait")
        return folder_store

    notes = CheckpointNotes(opened, health)
    notes.add(saved(1))
    eventually(lambda: len(tries) >= 3, 60.0)
    notes.close()
    notes.join(lambda: False)
    assert find_checkpoints(folder_store) == [saved(1)]
    assert "away" in str(health.as_data()["faults"])


def _no_store() -> Any:
    raise NotImplementedError


def test_numbers_of_thousands_of_digits_are_refused_in_long_texts() -> None:
    number = "9" * 4000
    for text in (f"[{number}]", f'{{"text": "{number * 100}"}}'):  # short, or no number
        assert parse_json(text.encode(), 2**30)
    for text in (f"[{', '.join([number] * 100)}]", f"[{', '.join([f'0.{number}'] * 100)}]"):
        with pytest.raises(OversizedJsonError, match=r"a number has 400\d digits"):
            parse_json(text.encode(), 2**30)
