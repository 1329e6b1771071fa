"""What holds of a segment as Arrow IPC and as Parquet alike: round trips, and hostile objects that are refused."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.processes import traced_memory
from tests.sdk.format import parquet_files
from tests.sdk.format.arrow_streams import Streams
from tests.sdk.format.blocks import BLOCK, INFOS, blocks, rows_of
from watchstep.errors import FormatError
from watchstep.format import segment
from watchstep.format.block import Block
from watchstep.reading import parquet_object

ROWS = len(BLOCK)
STREAMS = Streams.read(segment.encode(BLOCK))
MEMORY = 48 * 1024 * 1024


@dataclass(frozen=True)
class Format:
    """A format of segments.

    Attributes:
        name: of the format.
        encode: writes a block.
        decode: reads one, with or without histograms.
        with_metadata: the block with some metadata replaced.
        with_column: the block with one column replaced.
        limits: the module that limits objects.
    """

    name: str
    encode: Callable[[Block], bytes]
    decode: Callable[..., Block]
    with_metadata: Callable[[dict[str, Any]], bytes]
    with_column: Callable[[str, Any, Any], bytes]
    limits: ModuleType

    def refused(self, data: bytes) -> str:
        """What the error about an object states."""
        with pytest.raises(FormatError, match=r"segment run/seg\b.*\n  hint: ") as caught:
            self.decode(data)
        return caught.value.what

    def with_catalogue(self, entries: object) -> bytes:
        """The block with another catalogue."""
        packed = base64.b64encode(zlib.compress(json.dumps(entries).encode()))
        return self.with_metadata({"watchstep.tensors": packed})


ARROW = Format(
    "arrow",
    segment.encode,
    lambda data, *, histograms=True: segment.decode(data, "run/seg", histograms=histograms),
    lambda entries: STREAMS.with_metadata(
        **{key.replace(".", "__"): entries[key] for key in entries}
    ).encode(),
    lambda name, values, kind: (
        STREAMS.with_column(name, values, kind).with_facts(first=min(0, values[0])).encode()
    ),
    segment,
)
PARQUET = Format(
    "parquet",
    parquet_files.encode,
    parquet_files.decode,
    lambda entries: parquet_files.written(parquet_files.TABLE, **entries),
    parquet_files.with_column,
    parquet_object,
)
WHOLE = {ARROW.name: ARROW.encode(BLOCK), PARQUET.name: PARQUET.encode(BLOCK)}
each_format = pytest.mark.parametrize("form", [ARROW, PARQUET], ids=lambda form: form.name)
GOOD = [info.as_data() for info in INFOS]


@each_format
@given(block=blocks.filter(len))
def test_what_was_encoded_is_decoded(form: Format, block: Block) -> None:
    data = form.encode(block)
    light, complete = form.decode(data, histograms=False), form.decode(data)
    assert rows_of(complete) == rows_of(block)
    assert complete.catalogue == block.catalogue
    assert len(light.statistics.histogram) == len(light) == len(complete)
    again = replace(light, statistics=replace(light.statistics, histogram=complete.statistics.histogram))
    assert rows_of(again) == rows_of(complete)


@each_format
@pytest.mark.parametrize(
    ("schema", "hint"),
    [(4, "read the run with a newer"), (2, "read the run with the version that recorded it")],
)
def test_another_schema_is_refused_with_its_own_hint(form: Format, schema: int, hint: str) -> None:
    with pytest.raises(FormatError, match=rf"schema {schema}, this version reads schema 3\n  hint: {hint}"):
        form.decode(form.with_metadata({"watchstep": f'{{"schema": {schema}}}'}))


@each_format
@given(share=st.floats(0, 1, exclude_max=True))
@example(0.0)
@example(1 - 1e-9)
def test_every_truncation_is_refused(form: Format, share: float) -> None:
    data = WHOLE[form.name]
    form.refused(data[: int(share * len(data))])


@each_format
@pytest.mark.parametrize(
    "name", ["step", "worker", "replica", "shard_count", "shard_index", "count", "nan", "zero"]
)
def test_a_number_that_cannot_be_is_refused(form: Format, name: str) -> None:
    kind = parquet_files.TABLE.schema.field(name).type
    assert f"column {name} holds" in form.refused(form.with_column(name, [-1] * ROWS, kind))


@each_format
@pytest.mark.parametrize(
    ("name", "value"),
    [("worker", 2**28), ("shard_index", 2), ("count", 2**62), ("negative", 4), ("pos_inf", 3)],
)
def test_a_number_beyond_its_bound_is_refused(form: Format, name: str, value: int) -> None:
    kind = parquet_files.TABLE.schema.field(name).type
    assert "holds a number that cannot be" in form.refused(form.with_column(name, [value] * ROWS, kind))


@each_format
@pytest.mark.parametrize(
    "metadata",
    [
        {"watchstep": "{}"},
        {"watchstep": "no json"},
        {"watchstep": '{"schema": "x"}'},
        {"watchstep": '{"schema": Infinity}'},
        {"watchstep": "[" * 4000},
        {"watchstep": "[" * 100_000},
        {"watchstep.tensors": "not base64"},
        {"watchstep.tensors": base64.b64encode(b"not zlib")},
        {"watchstep.tensors": base64.b64encode(zlib.compress(b"[]")[:-1])},
    ],
)
def test_metadata_that_cannot_be_read_is_refused(form: Format, metadata: dict[str, Any]) -> None:
    form.refused(form.with_metadata(metadata))


LIES: list[Callable[[dict[str, Any]], Any]] = [
    lambda entry: entry | {"name": 3},
    lambda entry: entry | {"collections": 3},
    lambda entry: entry | {"collections": [3]},
    lambda entry: entry | {"role": None},
    lambda entry: entry | {"order": -1},
    lambda entry: entry | {"order": 1.5},
    lambda entry: entry | {"shape": [-1]},
    lambda entry: entry | {"shape": [2**63]},
    lambda entry: entry | {"shape": [True]},
    lambda entry: entry | {"derived": 1},
    lambda entry: {"name": entry["name"]},
    lambda entry: [entry],
    lambda entry: None,
]


@each_format
def test_a_catalogue_with_lies_is_refused(form: Format) -> None:
    assert rows_of(form.decode(form.with_catalogue(GOOD))) == rows_of(BLOCK)
    for lie in LIES:
        form.refused(form.with_catalogue([lie(GOOD[0]), *GOOD[1:]]))
    assert "two of its tensors have the same name" in form.refused(form.with_catalogue([*GOOD, GOOD[0]]))
    form.refused(form.with_catalogue(3))


@each_format
def test_a_catalogue_that_holds_other_data_than_tensors_is_refused(form: Format) -> None:
    def later(value: object) -> bytes:
        return form.with_catalogue([{**GOOD[0], "later": value}, *GOOD[1:]])

    assert "data other than tensors" in form.refused(later([[]] * 1000))
    assert "data other than tensors" in form.refused(later([0] * 10_000))
    assert rows_of(form.decode(later([[0]]))) == rows_of(BLOCK)


@each_format
def test_an_unpacked_catalogue_over_the_limit_is_refused(form: Format) -> None:
    bomb = base64.b64encode(zlib.compress(b"[" + b" " * (64 * 1024 * 1024) + b"]", 9))
    data = form.with_metadata({"watchstep.tensors": bomb})
    with traced_memory(MEMORY):
        assert "too large" in form.refused(data)


@each_format
def test_objects_and_rows_over_the_limit_are_refused(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    data = WHOLE[form.name]
    with monkeypatch.context() as limited:
        limited.setattr(form.limits, "MAX_BYTES", len(data) - 1)
        assert re.search(rf"(over the limit of|instead of 12 to) {len(data) - 1}", form.refused(data))
    monkeypatch.setattr(form.limits, "MAX_ROWS", ROWS - 1)
    assert f"claims {ROWS} rows" in form.refused(data)


@each_format
def test_very_many_probes_are_refused(form: Format) -> None:
    block = replace(BLOCK, probes={f"p{index}": np.zeros(ROWS) for index in range(65)})
    assert "65 probes" in form.refused(form.encode(block))


@each_format
@pytest.mark.parametrize(
    ("name", "fits"),
    [("n" * 4096, True), ("n" * 4097, False), ("é" * 2048, True), ("é" * 2049, False), ("😀" * 1025, False)],
)
def test_a_name_has_4096_bytes_at_most(form: Format, name: str, *, fits: bool) -> None:
    block = replace(BLOCK, catalogue=(replace(BLOCK.catalogue[0], name=name), *BLOCK.catalogue[1:]))
    data = form.encode(block)
    if fits:
        assert form.decode(data).catalogue == block.catalogue
    else:
        assert "4096" in form.refused(data)


@each_format
@pytest.mark.parametrize("word", ["role", "module", "module_type", "dtype", "optimizer", "collections"])
def test_other_words_of_a_tensor_have_4096_bytes_at_most(form: Format, word: str) -> None:
    long = "n" * 4097
    lie = {**GOOD[0], word: [long] if word == "collections" else long}
    assert "a word of 4097 characters" in form.refused(form.with_catalogue([lie, *GOOD[1:]]))
