from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.format.documents import OversizedJsonError, memory_needed, parse_json

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
    tracemalloc.start()
    try:
        parsed = json.loads(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parsed
    assert peak <= memory_needed(data) < 6 * peak


def test_lone_surrogates_become_question_marks() -> None:
    text = rb'{"reason": "no file \udce9", "face": "\uD83D\uDE00", "nan": NaN, "n": [1, 2.5]}'
    parsed = parse_json(text, 10_000)
    assert parsed["reason"] == "no file ?"
    assert parsed["face"] == "\U0001f600"
    assert parsed["n"] == [1, 2.5]
    json.dumps(parsed, ensure_ascii=False).encode()
