from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import FormatError
from watchstep.format import documents
from watchstep.format.documents import AttemptDocument, EndDocument, RunDocument
from watchstep.format.layout import SCHEMA_VERSION

RUN = RunDocument("vision", "r1", 5, ({"rule": "nan_or_inf"},), {"every": 3}, {"python": "3.11"})
ATTEMPT = AttemptDocument("a1", 7, world_size=8, on_stop="raise", host="node0")
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
        (RUN, {"environment": {"python": 3}}),
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
