from __future__ import annotations

import itertools
import json
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.runs import (
    Event,
    Rows,
    Watermark,
    all_at_once,
    follow,
    in_steps,
    norms,
    runs,
    splits,
    steps_of,
)
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block
from watchstep.reading.columns import Columns
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox import program
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.custom.sandbox.process import Child
from watchstep_rules.custom.sandbox.program import (
    limited_rule_time,
    out_of_time,
    rule_time_charged,
    rule_time_left,
)
from watchstep_rules.custom.sql.process import QuerySource, Question, SqlProgram, select
from watchstep_rules.custom.sql.query import QueryLimits
from watchstep_rules.custom.sql.rule import QUERIES_CHECKED
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule_files import rule_file

LOUD = "SELECT tensor, abs_mean AS value, 2 AS threshold FROM statistics WHERE abs_mean > 2"
FIRST = gradient("first")


def sql(query: str, **params: float) -> RuleConfig:
    data = {"rule": "sql", "params": {"query": query, **params}}
    return RuleConfig.model_validate(data, context=QUERIES_CHECKED)


def refusal(query: str) -> str:
    with pytest.raises(ValidationError) as caught:
        sql(query)
    (found,) = caught.value.errors()
    assert found["loc"] == ("params", "query")
    return str(found["msg"])


CACHES = Path("/proc/sys/vm/drop_caches")


@pytest.mark.ci
@pytest.mark.skipif(not os.access(CACHES, os.W_OK), reason="only root may drop the kernel's caches")
def test_a_child_outlives_the_kernels_cache_of_proc() -> None:
    program = SqlProgram.for_query(64)
    request = {"ask": "check", "query": LOUD}
    with POOL.child(program) as child:
        before = child.request(request, (), 60).document
        for _ in range(5):  # as the kernel does once memory is scarce
            CACHES.write_text("2")
        assert child.request(request, (), 60).document == before


def test_what_a_query_gives_are_findings_at_that_step() -> None:
    outcome = all_at_once(sql(LOUD), in_steps(norms("first", [1, 3, 1, 4]), norms("second", [1, 1, 1, 5])))
    assert [(f.step, f.tensor, f.value, f.threshold) for f in outcome.findings] == [
        (1, "first.weight:gradient", 3.0, 2.0),
        (3, "first.weight:gradient", 4.0, 2.0),
        (3, "second.weight:gradient", 5.0, 2.0),
    ]
    assert outcome.findings[0].message == "the query gives first.weight:gradient: value 3, threshold 2"
    assert outcome.memory.health is RuleHealth.OK


def test_a_gradient_that_is_all_nan_is_not_small() -> None:
    small = sql("SELECT tensor, l2 AS value FROM statistics WHERE l2 < 1e-7 OR l1 < 1e-7")
    outcome = all_at_once(small, in_steps(norms("first", [1, float("nan"), 0.0])))
    assert [finding.step for finding in outcome.findings] == [2]


def test_a_query_looks_back_over_its_window_and_no_further() -> None:
    mean = (
        "SELECT tensor, avg(abs_mean) AS value, 'mean of ' || count(*) AS message FROM statistics "
        "GROUP BY tensor HAVING value >= 2"
    )
    outcome = all_at_once(sql(mean, window=3), in_steps(norms("first", [9, 0, 0, 0, 3, 3])))
    assert [(f.step, f.value, f.message) for f in outcome.findings] == [
        (0, 9.0, "mean of 1"),
        (1, 4.5, "mean of 2"),
        (2, 3.0, "mean of 3"),
        (5, 2.0, "mean of 3"),
    ]


def test_an_earlier_step_of_the_window_is_not_found_again() -> None:
    rows = in_steps(norms("first", [1, 3, 1, 1]))
    steps = "SELECT step, tensor FROM statistics WHERE abs_mean > 2"
    assert steps_of(all_at_once(sql(steps, window=3), rows), FIRST.name) == [1]
    without = "SELECT tensor FROM statistics WHERE abs_mean > 2"
    assert steps_of(all_at_once(sql(without, window=3), rows), FIRST.name) == [1, 2, 3]


def test_a_tensor_that_was_not_recorded_at_the_step_has_no_finding() -> None:
    rows = block_of([Row(0, FIRST, [3.0]), Row(1, gradient("second"), [1.0])])
    query = "SELECT tensor FROM statistics WHERE abs_mean > 2"
    assert steps_of(all_at_once(sql(query, window=5), rows), FIRST.name) == [0]


def test_columns_state_which_worker_and_mode_are_meant() -> None:
    rows = block_of([Row(0, FIRST, [3.0], worker=worker, mode=mode) for worker in (0, 1) for mode in ("train", "eval")])  # fmt: skip
    query = "SELECT tensor, 1 AS worker, 'eval' AS mode FROM statistics"
    (finding,) = all_at_once(sql(query), rows).findings
    assert (finding.worker, finding.mode) == (1, "eval")
    (finding,) = all_at_once(sql("SELECT tensor FROM statistics"), rows).findings
    assert (finding.worker, finding.mode) == (0, "train")


def test_the_tables_are_those_of_a_run() -> None:
    loss = tensor("loss", "losses", shape=())
    rows = block_of([Row(0, FIRST, [3.0], probes={"cosine": -0.5}), Row(0, loss, [7.0])])
    joined = (
        'SELECT tensor, "probe.cosine" AS value, (SELECT max(value) FROM losses) AS threshold FROM statistics '
        "JOIN tensors ON name = tensor WHERE module_type = 'Linear' AND role = 'gradient'"
    )
    (finding,) = all_at_once(sql(joined), rows).findings
    assert (finding.tensor, finding.value, finding.threshold) == (FIRST.name, -0.5, 7.0)
    rule = sql(joined)
    assert rule.implementation.needed(rule.parameters).probes == ("cosine",)


def test_a_probe_that_was_not_recorded_is_null_and_a_figure_that_does_not_exist_infinite() -> None:
    rows = block_of([Row(0, FIRST, [float("nan")])])
    query = 'SELECT tensor, min AS value FROM statistics WHERE "probe.nothing" IS NULL'
    (finding,) = all_at_once(sql(query), rows).findings
    assert finding.value == float("inf")


def test_what_is_recorded_later_does_not_show_in_the_table_of_tensors() -> None:
    rows = block_of([Row(0, FIRST, [1.0]), Row(1, FIRST, [1.0]), Row(1, gradient("second"), [1.0])])
    query = f"SELECT '{FIRST.name}' AS tensor, (SELECT count(*) FROM tensors) AS value"
    assert [f.value for f in all_at_once(sql(query), rows).findings] == [1.0, 2.0]


QUERIES = (
    ("SELECT tensor, worker, mode, abs_max AS value FROM statistics WHERE abs_max > 2", 1),
    (
        (
            "SELECT tensor, worker, mode, avg(abs_mean) AS value, count(*) AS threshold FROM statistics "
            "GROUP BY ALL HAVING count(*) > 1"
        ),
        4,
    ),
    (
        (
            "SELECT s.tensor, s.worker, max(v.value) AS value, count(DISTINCT t.name) AS threshold FROM statistics s "
            "JOIN tensors t ON t.name = s.tensor LEFT JOIN losses v ON v.step <= s.step GROUP BY ALL"
        ),
        7,
    ),
    ('SELECT step, tensor, mode, worker, "probe.update_ratio" AS value FROM statistics WHERE nan > 0', 3),
)


@pytest.mark.ci
@pytest.mark.parametrize(("query", "window"), QUERIES, ids=range(len(QUERIES)))
@settings(max_examples=6)
@given(events=runs(), data=st.data())
def test_splitting_a_run_changes_no_finding_of_a_query(
    query: str, window: int, events: list[Event], data: st.DataObject
) -> None:
    config = sql(query, window=window, seconds=60)  # however busy the machine is
    first_split, second_split = data.draw(splits(events)), data.draw(splits(events))
    outcome = follow(config, first_split)
    event(f"findings: {bool(outcome.findings)}")
    assert outcome == follow(config, second_split) == follow(config, [[single] for single in events])
    assert outcome.memory.health is RuleHealth.OK, outcome.memory.problem


def test_nothing_recorded_is_nothing_found() -> None:
    rule = sql(LOUD)
    given_back = rule.implementation.evaluate(
        rule.parameters, rule.implementation.state_type(), Block.empty(), Block.empty(), 0
    )
    assert given_back[1] == []


ATTACKS = {
    "SELECT * FROM read_csv('/etc/passwd')": "'read_csv'",
    "SELECT content AS tensor FROM read_text('/etc/passwd')": "'read_text'",
    "SELECT * FROM '/etc/passwd'": "'/etc/passwd'",
    "SELECT * FROM 'runs.parquet'": "'runs.parquet'",
    "SELECT file AS tensor FROM glob('/etc/*')": "'glob'",
    "SELECT getenv('HOME') AS tensor": "'getenv'",
    "SELECT tensor FROM query('SELECT 1')": "'query'",
    "SELECT tensor FROM query_table('statistics')": "'query_table'",
    "SELECT name AS tensor FROM duckdb_settings()": "'duckdb_settings'",
    "SELECT name AS tensor FROM duckdb_secrets()": "'duckdb_secrets'",
    "SELECT current_setting('memory_limit') AS tensor": "'current_setting'",
    "SELECT getvariable('x') AS tensor": "'getvariable'",
    "SELECT table_name AS tensor FROM information_schema.tables": "'information_schema.tables'",
    "SELECT name AS tensor FROM sqlite_master": "'sqlite_master'",
    "SELECT name AS tensor FROM catalogue": "'catalogue'",
    "SELECT tensor FROM connection": "'connection'",
    "SELECT i::VARCHAR AS tensor FROM range(1000000000000) t(i)": "'range'",
    "SELECT repeat('x', 1000000000) AS tensor": "'repeat'",
    "SELECT lpad('x', 1000000000, 'x') AS tensor": "'lpad'",
    "SELECT unnest([1, 2])::VARCHAR AS tensor": "'unnest'",
    "SELECT list_transform([1], lambda x: x)::VARCHAR AS tensor": "'list_transform'",
    "WITH RECURSIVE a AS (SELECT 1 x UNION ALL SELECT x + 1 FROM a) SELECT x::VARCHAR AS tensor FROM a": "recursive",
    "ATTACH '/tmp/x.db'": "ATTACH",
    "PRAGMA version": "pragma",
    "SET memory_limit = '10GB'": "SET",
    "RESET lock_configuration": "SET",
    "COPY statistics TO '/tmp/x'": "COPY",
    "EXPORT DATABASE '/tmp/x'": "EXPORT",
    "INSTALL httpfs": "LOAD",
    "LOAD httpfs": "LOAD",
    "CREATE TABLE x AS SELECT 1": "CREATE",
    "CREATE MACRO f() AS 1": "CREATE",
    "CREATE SECRET s (TYPE s3)": "CREATE",
    "DELETE FROM statistics": "DELETE",
    "INSERT INTO statistics SELECT * FROM statistics": "INSERT",
    "CALL pragma_version()": "CALL",
    "PREPARE x AS SELECT 1": "PREPARE",
    "BEGIN": "TRANSACTION",
    "EXPLAIN ANALYZE SELECT 1": "EXPLAIN",
    "SHOW TABLES": "show ref",
    "DESCRIBE statistics": "show ref",
    "SELECT tensor FROM statistics; DROP TABLE statistics": "2 statements",
    ";": "0 statements",
    "SELECT tensor FROM statistics) UNION ALL (SELECT tensor FROM statistics": "syntax error",
    "SELECT random()::VARCHAR AS tensor": "'random'",
    "SELECT now()::VARCHAR AS tensor": "'now'",
    "SELECT current_timestamp::VARCHAR AS tensor": "'current_timestamp'",
    "SELECT current_user AS tensor": "'current_user'",
    "SELECT tensor FROM statistics TABLESAMPLE 10%": "samples",
    "SELECT tensor FROM statistics WHERE $1": "parameter",
    f"SELECT {'(' * 3000}1{')' * 3000} AS tensor": "value error",
    f"SELECT {'+'.join(['1'] * 6000)} AS tensor": "characters",
}


@pytest.mark.parametrize(("query", "names"), ATTACKS.items(), ids=lambda text: text[:40])
def test_a_query_that_may_not_be_run_is_refused_when_it_is_configured(query: str, names: str) -> None:
    assert names.lower() in refusal(query).lower()


def twice(body: str, times: int, first: str = "SELECT tensor FROM statistics") -> str:
    """Tables each of which uses the previous one twice."""
    each = ", ".join(f"a{n} AS {body.format(n - 1)}" for n in range(1, times))
    return f"WITH a0 AS ({first}), {each} SELECT tensor FROM a{times - 1}"


def joined(tables: int) -> str:
    on = "".join(f" JOIN statistics a{n} ON a{n}.step = a{n - 1}.step" for n in range(1, tables))
    return f"SELECT a0.tensor FROM statistics a0{on}"


def doubled(times: int) -> str:
    """Columns each of which uses the previous one twice."""
    return "mean AS c0, " + ", ".join(f"c{n - 1} + c{n - 1} AS c{n}" for n in range(1, times))


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (twice("NOT MATERIALIZED (SELECT x.tensor FROM a{0} x, a{0} y)", 24), "more than 32 tables"),
        (twice("(SELECT x.tensor FROM a{0} x, a{0} y)", 24), "more than 32 tables"),
        (twice("(FROM a{0} UNION ALL FROM a{0})", 24), "more than 32 tables"),
        (twice("(SELECT tensor FROM a{0} WHERE EXISTS (FROM a{0}))", 24), "more than 32 tables"),
        ("SELECT a0.tensor FROM " + ", ".join(f"statistics a{n}" for n in range(500)), "more than 32 tables"),
        (
            "SELECT 'x' AS tensor FROM " + ", ".join(f"(SELECT 1) a{n}" for n in range(500)),
            "more than 32 tables",
        ),
        (joined(33), "more than 32 tables"),
        (
            "SELECT a.name AS tensor FROM " + ", ".join(f"tensors {c}" for c in "abcdefghijklmnopq"),
            "32 tables",
        ),
        (
            "WITH " + ", ".join(f"a{n} AS (FROM losses, losses)" for n in range(33)) + " FROM statistics",
            "64 tables",
        ),
        (
            "SELECT tensor FROM " + "(FROM " * 40 + "statistics" + ")" * 40,
            "more than 32 queries within each other",
        ),
        (f"SELECT tensor, {doubled(30)} FROM statistics", "more than 5000 expressions"),
        (
            f"SELECT tensor FROM (SELECT tensor, {doubled(30)} FROM statistics) WHERE c29 > 1",
            "5000 expressions",
        ),
        (f"SELECT tensor, {doubled(13)}, (SELECT c12 + c12) AS value FROM statistics", "5000 expressions"),
    ],
    ids=lambda text: text[:60],
)
def test_a_query_whose_plan_would_be_endless_is_refused_before_it_is_planned(query: str, names: str) -> None:
    assert names in refusal(query)


def test_a_query_of_many_tables_and_columns_within_the_bounds_is_taken() -> None:
    alone = in_steps(norms("first", [1.0] * 3))
    assert len(all_at_once(sql(joined(32), seconds=30.0), alone).findings) == 3
    body = twice("NOT MATERIALIZED (SELECT x.tensor FROM a{0} x JOIN a{0} y ON x.tensor = y.tensor)", 6)
    assert len(all_at_once(sql(body), alone).findings) == 3
    chosen = "(SELECT tensor, c6 AS value FROM (SELECT tensor, {} FROM statistics))"
    assert len(all_at_once(sql("FROM " + chosen.format(doubled(7))), ROWS).findings) == 160


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("SELECT tensor FRO statistics", "syntax error"),
        ("SELECT tensr FROM statistics", '"tensr"'),
        ("SELECT step FROM statistics", "no column 'tensor'"),
        ("SELECT tensor, step AS foo FROM statistics", "'foo'"),
        ("SELECT tensor, tensor FROM statistics", "'tensor_1'"),
        ("SELECT tensor, tensor AS value FROM statistics", "a number"),
        ("SELECT tensor, 1.5 AS worker FROM statistics", "a whole number"),
        ("SELECT 1 AS tensor FROM statistics", "text"),
        ("SELECT tensor FROM nothing", "the tables are statistics, tensors, losses"),
    ],
)
def test_an_error_is_reported_when_the_query_is_configured(query: str, names: str) -> None:
    assert names in refusal(query)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT tensor FROM (SELECT {} FROM statistics a) x".format(",".join(["a.*"] * 1400)),
        "WITH a AS (SELECT {} FROM statistics s), b AS (SELECT {} FROM a) SELECT tensor FROM b".format(
            ",".join(["s.*"] * 40), ",".join(["a.*"] * 40)
        ),
        "SELECT {} FROM statistics".format(",".join(["COLUMNS(*) + 1"] * 100)),
        "SELECT tensor FROM statistics WHERE {}".format(" AND ".join(["COLUMNS(*) = 1"] * 300)),
    ],
    ids=["select", "with", "expressions", "where"],
)
def test_a_star_is_counted_as_the_columns_for_which_it_stands(query: str) -> None:
    assert "more than 5000 expressions" in refusal(query)


def test_a_star_over_a_few_columns_may_be_used_often() -> None:
    few = "(SELECT tensor, worker, mode FROM statistics)"
    stars = ",".join(["x.*"] * 500)
    outcome = all_at_once(sql(f"SELECT y.tensor FROM (SELECT {stars} FROM {few} x) y WHERE 1 = 1"), ROWS)
    assert (outcome.memory.health, len(outcome.findings)) == (RuleHealth.OK, 160)


def test_a_rule_file_names_the_place() -> None:
    text = "rules:\n  - rule: sql\n    name: mine\n    params: {query: SELECT tensr FROM statistics}\n"
    with pytest.raises(Exception, match=r"(?s)params.*tensr"):
        rule_file.parse(text, "mine.yaml")


ROWS = in_steps(*(norms(f"layer{layer}", [1.0] * 20) for layer in range(8)))


@pytest.mark.parametrize(
    ("query", "limits", "message", "judged"),
    [
        (
            (
                "SELECT a.tensor FROM statistics a, statistics b, statistics c, statistics d, statistics e, statistics f "
                "GROUP BY a.tensor HAVING sum(a.mean * b.mean * c.mean + d.mean + e.mean * f.mean) > 1e300"
            ),
            {"seconds": 0.2},
            "took more than 0.2 s",
            [],
        ),
        (
            "WITH a0 AS (SELECT tensor AS s FROM statistics)"
            + "".join(f", a{n} AS (SELECT s || s AS s FROM a{n - 1})" for n in range(1, 40))
            + " SELECT s AS tensor FROM a39",
            {"memory_mb": 32},
            "took more than 32 MiB",
            [],
        ),
        ("SELECT a.tensor FROM statistics a, statistics b, statistics c", {}, "more than 10000 rows", [0, 1]),
        ("SELECT (tensor::INTEGER)::VARCHAR AS tensor FROM statistics", {}, "Conversion Error", []),
    ],
)
def test_a_query_that_fails_or_takes_too_much_is_reported_as_health(
    query: str, limits: dict[str, float], message: str, judged: list[int]
) -> None:
    outcome = all_at_once(sql(query, window=20, **limits), ROWS.where(ROWS.step < 5))
    assert outcome.memory.health is RuleHealth.ERROR
    assert message in outcome.memory.problem
    assert steps_of(outcome, "layer0.weight:gradient") == judged
    assert all_at_once(sql(LOUD), ROWS).memory.health is RuleHealth.OK


def test_a_step_at_which_the_query_fails_is_reported_and_the_others_are_judged() -> None:
    config = sql(
        "SELECT tensor FROM statistics WHERE CAST(CASE WHEN step = 2 THEN 'x' ELSE '1' END AS INTEGER) = 1"
    )
    rows = in_steps(norms("first", [1.0] * 4), norms("second", [1.0] * 4))
    whole = all_at_once(config, rows)
    assert steps_of(whole, FIRST.name) == [0, 1, 3]
    assert whole.memory.health is RuleHealth.ERROR
    assert "1 step was not judged" in whole.memory.problem
    assert "SQL at step 2: Conversion Error" in whole.memory.problem
    assert whole == follow(
        config, [[Rows(rows.where(rows.step == step)), Watermark(step)] for step in range(4)]
    )


def test_without_duckdb_the_error_states_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("watchstep_rules.custom.sql.process.version", missing)
    assert "pip install 'watchstep[sql]'" in refusal("SELECT tensor FROM statistics WHERE 2 = 2")


def test_an_older_duckdb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchstep_rules.custom.sql.process.version", lambda _: "1.4.5")
    assert "at least 1.5 is needed" in refusal("SELECT tensor FROM statistics WHERE 1 = 1")


def hostile(operands: int = 60, depth: int = 6) -> str:
    """Texts joined to longer texts, again and again: nothing that the guard, or DuckDB's limit of memory, counts."""
    query = "SELECT tensor AS s FROM statistics"
    for _ in range(depth):
        query = f"SELECT {' || '.join(['s'] * operands)} AS s FROM ({query})"
    return f"SELECT s AS tensor FROM ({query})"


@pytest.mark.ci
def test_a_query_that_takes_any_amount_of_memory_is_ended_and_other_rules_continue() -> None:
    config = sql(hostile())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = all_at_once(config, ROWS.where(ROWS.step < 3))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (outcome.memory.health, outcome.findings) == (RuleHealth.ERROR, [])
    assert "3 steps were not judged" in outcome.memory.problem
    assert "took more than 256 MiB" in outcome.memory.problem
    assert after - before < 64 * 1024  # KiB
    assert all_at_once(sql(LOUD), ROWS).memory.health is RuleHealth.OK


def test_a_query_that_takes_any_amount_of_memory_for_a_constant_is_ended_when_it_is_configured() -> None:
    query = "SELECT 'abcdefgh' AS s"
    for _ in range(6):
        query = f"SELECT {' || '.join(['s'] * 60)} AS s FROM ({query})"
    assert "took more than 64 MiB" in refusal(f"SELECT s AS tensor FROM ({query})")
    assert all_at_once(sql(LOUD), ROWS).memory.health is RuleHealth.OK


@pytest.mark.ci
def test_a_query_that_cannot_be_interrupted_is_ended_with_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child is stopped instead of running an endless plan: neither reacts to an interrupt."""
    monkeypatch.setattr("watchstep_rules.custom.sql.process._GRACE_SECONDS", 0.0)
    config = sql("SELECT tensor FROM statistics WHERE step >= 0", seconds=0.5)
    real = Child.send

    def stopped(self: Child, request: dict[str, Any], *others: Any) -> None:
        if request.get("ask") == "judge":  # before the request, which the child could answer at once
            os.kill(self.pid, signal.SIGSTOP)
        real(self, request, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Child, "send", stopped)
        outcome = all_at_once(config, ROWS.where(ROWS.step < 3))
    assert "3 steps were not judged" in outcome.memory.problem
    assert "took more than 0.5 s and was ended" in outcome.memory.problem
    assert "started again in" in outcome.memory.problem  # who ends its process waits for the next
    assert all_at_once(sql(LOUD), ROWS).memory.health is RuleHealth.OK  # other queries do not


@pytest.mark.ci
def test_where_no_process_can_be_started_a_query_is_taken_and_told_when_it_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("watchstep_rules.custom.sandbox.process._popen", refused)
    POOL.close()
    config = sql("SELECT tensor FROM statistics WHERE step >= 1")
    outcome = follow(RuleConfig(rule="sql", params=config.params), [[Rows(ROWS), Watermark(19)]])
    assert outcome.memory.health is RuleHealth.ERROR
    assert "no process can be started" in outcome.memory.problem


TABLES = "abcdefghijklmn"
ENDLESS = (
    f"SELECT a.tensor FROM {', '.join(f'statistics {name}' for name in TABLES)} "
    f"GROUP BY a.tensor HAVING sum({' + '.join(f'{name}.mean' for name in TABLES)}) > 1e300"
)
"""It ends for one row, and not within days for the rows of a window."""


@pytest.mark.ci
def test_rules_that_take_longer_than_an_evaluation_allows_leave_the_rest_unjudged() -> None:
    block = in_steps(norms("first", [3.0] * 6))
    with limited_rule_time(0.5) as rule_time:
        outcome = all_at_once(sql(ENDLESS, seconds=60.0, window=100), block)
        again = all_at_once(sql(LOUD), block)
    assert rule_time.left <= 0
    for verdict in (outcome, again):
        assert verdict.findings == []
        assert verdict.memory.health is RuleHealth.ERROR
    problem = again.memory.problem
    assert problem.startswith("6 steps were not judged; last error: SQL at step 5: the SQL and Python rules")
    assert "took over 0.5 s in one evaluation" in problem
    assert "WATCHSTEP_RULE_SECONDS" in problem
    assert len(all_at_once(sql(LOUD), block).findings) == 6


def test_a_time_limit_of_some_rules_counts_in_the_limit_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(program, "_now", lambda: float(next(clock)))
    with limited_rule_time(10.0) as outer:
        with limited_rule_time(3.0, "these rules", "request fewer") as inner:
            with rule_time_charged():
                assert rule_time_left() == 2.0  # of the inner limit
            assert (inner.spent, outer.spent) == (2.0, 2.0)
            error = out_of_time("SQL")
            assert (error.what, error.hint) == (
                "SQL: these rules took over 3 s in one evaluation", "request fewer",
            )  # fmt: skip
        assert rule_time_left() == 8.0
        with limited_rule_time(60.0, "these rules", "request fewer"):
            assert rule_time_left() == 8.0
            for _ in range(8):
                with rule_time_charged():
                    pass
            assert "the SQL and Python rules of the run took over 10 s" in out_of_time("SQL").what


# Queries about a run in a child process: what they request, and that the child serves the next query.


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
