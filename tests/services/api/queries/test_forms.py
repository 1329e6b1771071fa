"""Encoded tables."""

from __future__ import annotations

import csv
import io
import re

import pyarrow as pa
import pyarrow.parquet as pq

from tests.infra.compose import ROOT
from watchstep_services.api.queries.forms import _FORMULA, encode_table

FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"]
TEXTS = ["model.weight", "a=1", "a\n=1", "'=1", "", None]
TABLE = pa.table({"tensor": pa.array([*FORMULAS, *TEXTS], pa.string()), "value": [-1.5] * 12})


def test_texts_in_csv_are_no_formulas() -> None:
    rows = list(csv.DictReader(io.StringIO(encode_table(TABLE, "csv", "t").content.decode(), newline="")))
    shown = [f"'{text}" for text in FORMULAS] + [text or "" for text in TEXTS]
    assert [row["tensor"] for row in rows] == shown
    assert {row["value"] for row in rows} == {"-1.5"}


def test_texts_in_parquet_are_unchanged() -> None:
    assert pq.read_table(pa.BufferReader(encode_table(TABLE, "parquet", "t").content)) == TABLE


def test_the_page_has_the_same_formulas() -> None:
    source = (ROOT / "web" / "src" / "components" / "download.ts").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"/\^(\[.*?\])/\.test\(value\)", source)
    assert pattern == _FORMULA.removeprefix(r"\A(").removesuffix(")")
