"""Forms of responses with numbers: JSON, CSV, Parquet, Arrow, and safetensors for matrices."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import Header, Query, Response
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.snapshot import Described, aligned_order, header
from watchstep_services.api.queries.answers import ARROW

if TYPE_CHECKING:
    import pyarrow as pa
    from pydantic import BaseModel

Form = Literal["json", "csv", "parquet", "arrow", "safetensors"]

MEDIA_TYPES: dict[Form, str] = {
    "json": "application/json",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
    "arrow": ARROW,
    "safetensors": "application/vnd.safetensors",
}
TABLES: tuple[Form, ...] = ("json", "csv", "parquet", "arrow")
MATRICES: tuple[Form, ...] = (*TABLES, "safetensors")

FormatParameter = Annotated[
    Form | None,
    Query(alias="format", description="Form of the response; default: by the header Accept, else JSON."),
]
AcceptHeader = Annotated[str | None, Header(alias="Accept", max_length=1000, include_in_schema=False)]

_FORMULA = r"\A([=+\-@\t\r])"
"""Beginning of a text that spreadsheets run as a formula, also after a tab or a carriage return. The web page uses the same one."""

_DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.int64): "I64", np.dtype(np.uint32): "U32"}


@dataclass(frozen=True)
class View:
    """An encoded response.

    Attributes:
        content: the body.
        media_type: its media type.
        headers: further headers.
    """

    content: bytes
    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self, etag: str) -> Response:
        """Return the response with its ETag."""
        headers = {**self.headers, "etag": etag, "cache-control": "private, no-cache", "vary": "Accept"}
        return Response(self.content, media_type=self.media_type, headers=headers)


def documented_forms(forms: Collection[Form]) -> dict[int | str, dict[str, Any]]:
    """Return the entry of the OpenAPI document for forms other than JSON."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    text = {"schema": {"type": "string"}}
    content = {MEDIA_TYPES[form]: text if form == "csv" else binary for form in forms if form != "json"}
    return {200: {"content": content}}


def form_of(requested: Form | None, accept: str | None, forms: Collection[Form]) -> Form:
    """Return the form of a response: as requested, else the first accepted one other than JSON, else JSON.

    Raises:
        ConfigError: the response does not have the requested form.
    """
    if requested is not None:
        if requested not in forms:
            raise ConfigError(
                f"format {requested!r}: this response does not have it", f"use {', '.join(forms)}"
            )
        return requested
    accepted = [part.partition(";")[0].strip() for part in (accept or "").split(",")]
    return next((form for form in forms if form != "json" and MEDIA_TYPES[form] in accepted), "json")


def encode_model(model: BaseModel) -> View:
    """Encode a model as JSON. FastAPI would validate it a second time."""
    return View(model.model_dump_json().encode(), MEDIA_TYPES["json"])


def encode_table(table: pa.Table, form: Form, name: str) -> View:
    """Encode a table as a file. In CSV, texts that a spreadsheet would run as formulas get an apostrophe.

    Args:
        table: the table.
        form: csv, parquet or arrow.
        name: name of the file, without an extension.
    """
    import pyarrow as pa

    sink = io.BytesIO()
    if form == "csv":
        import pyarrow.csv

        pyarrow.csv.write_csv(_without_formulas(table), sink)
    elif form == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, sink, compression="zstd")
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return View(sink.getvalue(), ARROW)
    disposition = {"content-disposition": f'attachment; filename="{name}.{form}"'}
    return View(sink.getvalue(), MEDIA_TYPES[form], disposition)


def _without_formulas(table: pa.Table) -> pa.Table:
    """Return a table whose texts are no formulas: recorders choose names, and spreadsheets run a text such as ``=1+1``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if pa.types.is_string(column.type):
            texts = pc.replace_substring_regex(column, _FORMULA, r"'\1")
            table = table.set_column(place, name, texts)
    return table


def encode_matrices(matrices: Mapping[str, NDArray[Any]], description: BaseModel | Any) -> View:
    """Encode matrices as safetensors: little-endian, each aligned to its elements.

    Args:
        matrices: float32, int64 or uint32 by name.
        description: what they are; in the header's metadata, as JSON under ``description``.
    """
    described = [Described(name, _DTYPES[matrix.dtype], matrix.shape) for name, matrix in matrices.items()]
    order = aligned_order(described)
    values = [np.ascontiguousarray(matrix) for matrix in matrices.values()]
    head = header([described[place] for place in order], {"description": json.dumps(description)})
    content = b"".join([head, *(values[place].tobytes() for place in order)])
    return View(content, MEDIA_TYPES["safetensors"])


def as_float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return values in single precision; larger ones become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
