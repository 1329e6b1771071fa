"""Queries about a run in a child process: what they request, and that the child serves the next query."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from watchstep.reading.columns import Columns
from watchstep_rules.custom.sql.process import QuerySource, Question, select
from watchstep_rules.custom.sql.query import QueryLimits


def test_a_query_with_a_limit_does_not_request_rows_after_its_end() -> None:
    pytest.importorskip("duckdb")
    step = np.arange(1000, dtype=np.int64)
    requested = 0

    def scan(names: Sequence[str], _tensors: frozenset[str] | None) -> Iterator[Columns]:
        nonlocal requested
        for _ in range(200):
            requested += 1
            yield dict.fromkeys(names, step)

    source = QuerySource((), (), scan)
    for _ in range(20):  # the same child serves all
        answer = select(Question("SELECT step FROM statistics", 7, "json", QueryLimits(256, 10.0)), source)
        assert len(json.loads(bytes(answer.content))["rows"]) == 7
    assert requested <= 20 * 10
