"""Python rules: the findings of the class, for any split of a run, in a process that is reused and restarted."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.custom.programs import HEAD, LOUD, python
from tests.rules.runs import (
    Event,
    Outcome,
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
from watchstep.errors import ConfigError, RuleError
from watchstep.format.block import Block, concatenate
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom import python_rule
from watchstep_rules.custom.sandbox import confinement, pool
from watchstep_rules.custom.sandbox.confinement import Isolation, why_not
from watchstep_rules.custom.sandbox.pool import BusyError, Pool, on_behalf_of
from watchstep_rules.custom.sandbox.process import Child, DeadError, SandboxedRule
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule import Needs
from watchstep_rules.rule_files import rule_file

ROWS = in_steps(norms("first", [1.0, 3.0, 9.0, 1.0]), norms("second", [1.0, 1.0, 1.0, 9.0]))
FIRST, SECOND = "first.weight:gradient", "second.weight:gradient"
LOUD_RULE = {"source": LOUD, "class": "Loud"}


def loud(**params: object) -> RuleConfig:
    return python(LOUD, "Loud", params=params)


def test_what_the_class_says_is_found() -> None:
    outcome = all_at_once(loud(threshold=3.0), ROWS)
    assert steps_of(outcome, FIRST) == [2, 3]
    assert steps_of(outcome, SECOND) == []
    assert outcome.findings[0].message == f"{FIRST} is loud"
    assert (outcome.findings[0].rule, outcome.findings[0].module_type) == ("python", "Linear")
    assert outcome.memory.health is RuleHealth.OK
    assert outcome.memory.state is not None
    assert outcome.memory.state["data"] == {"judged": 8}
    assert outcome.memory.state["isolation"]["rlimits"] is True


def test_what_the_class_needs_holds() -> None:
    config = loud(over=7)
    rule, params = config.implementation, config.parameters
    assert rule.lookback(params) == 6
    assert rule.merged(params) == "watermark"
    assert rule.needed(params) == Needs(("gradients",), probes=("update_ratio",))


@pytest.mark.ci
def test_a_class_that_looks_into_histograms_reports_it() -> None:
    source = LOUD.replace(
        "        findings = []\n", "        findings = []\n        block.statistics.histogram.bins\n", 1
    )
    outcome = follow(python(source, "Loud"), [[Rows(ROWS), Watermark(3)]])
    assert outcome.memory.health is RuleHealth.ERROR
    assert "histogram.bins: the histograms of these rows were not read" in outcome.memory.problem
    needs = 'Needs(collections=("gradients",)'
    outcome = follow(
        python(source.replace(needs, f"{needs}, histograms=True"), "Loud"), [[Rows(ROWS), Watermark(3)]]
    )
    assert (outcome.memory.health, len(outcome.findings)) == (RuleHealth.OK, 3)


@pytest.mark.ci
@settings(max_examples=10)
@given(events=runs(), data=st.data())
def test_splitting_a_run_changes_no_finding(events: list[Event], data: st.DataObject) -> None:
    config = loud(threshold=0.5)
    outcome = follow(config, data.draw(splits(events)))
    assert outcome == follow(config, [[single] for single in events])
    assert outcome.memory.health is not RuleHealth.ERROR, outcome.memory.problem


@pytest.mark.ci
@pytest.mark.parametrize("most", [1, 3, 5, 7])
@pytest.mark.parametrize("merge", ["watermark", "per_worker"])
def test_a_large_block_is_sent_in_parts(most: int, merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(ROWS, worker=ROWS.worker + 1, time_ns=ROWS.time_ns + 1)
    source = f"{LOUD}\nclass Either(Loud):\n    merge = {merge!r}\n"
    config = python(source, "Either", params={"threshold": 0.4})
    whole = all_at_once(config, concatenate([ROWS, other]))
    monkeypatch.setattr(python_rule, "_MAX_ROWS", most)
    assert all_at_once(config, concatenate([ROWS, other])) == whole
    assert len(whole.findings) == 16


ODD = (
    HEAD
    + '''
class OddState(State):
    declared: float = 0.0
    whatever: object = 0.0


class Odd(Rule[Params, OddState]):
    """Has NaN in its state; reports rows that it could not judge."""

    name, summary, merge, needs = "odd", "is odd", "watermark", Needs(collections=())

    def problem(self, state):
        return "one step was not judged" if state.declared != state.declared else ""

    def evaluate(self, params, state, context, block, now):
        return OddState({}=float("nan")), []
'''
)


@pytest.mark.ci
def test_a_class_reports_what_it_could_not_judge_and_its_state_of_floats_reads_back() -> None:
    outcome = all_at_once(python(ODD.format("declared"), "Odd"), ROWS)
    assert (outcome.memory.health, outcome.memory.problem) == (RuleHealth.ERROR, "one step was not judged")
    assert outcome.memory.state is not None
    assert outcome.memory.state["data"] == {"declared": "NaN", "whatever": 0.0}
    assert outcome.memory.evaluated_rows == len(ROWS)


@pytest.mark.ci
def test_a_state_that_would_read_back_as_another_is_refused() -> None:
    outcome = all_at_once(python(ODD.format("whatever"), "Odd"), ROWS)
    assert "its state has NaN or infinity where no float is declared" in outcome.memory.problem


@pytest.mark.ci
def test_state_of_another_version_is_made_anew() -> None:
    config = loud()
    rule, params = config.implementation, config.parameters
    context, block = ROWS.where(ROWS.step < 2), ROWS.where(ROWS.step >= 2)
    state, _ = rule.evaluate(params, rule.state_type(), Block.empty(), context, 0)
    again, _ = rule.evaluate(params, state, context, block, 0)
    assert again.data == {"judged": 8}
    other, _ = rule.evaluate(params, state.model_copy(update={"version": 9}), context, block, 0)
    assert other.data == {"judged": 8}


@pytest.mark.ci
def test_several_threads_may_ask_at_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: all_at_once(loud(threshold=3.0), ROWS).findings, range(8)))
    assert all(found == results[0] for found in results)


def test_a_config_is_data_that_reads_back() -> None:
    config = loud(threshold=3.0)
    assert RuleConfig.model_validate(config.as_data()) == config


def refusal(**params: object) -> str:
    with pytest.raises(ValidationError) as caught:
        RuleConfig(rule="python", params=params)
    return str(caught.value)


@pytest.mark.ci
def test_what_is_wrong_is_reported_when_it_is_configured() -> None:
    assert "set file or module" in refusal(**{"class": "Loud"})
    assert "not both" in refusal(source=LOUD, module="json", **{"class": "Loud"})
    assert "the source of 'mine.py' is missing" in refusal(file="mine.py", **{"class": "Loud"})
    assert "params.threshold" in refusal(params={"threshold": "much"}, **LOUD_RULE)
    assert "params.nothing" in refusal(params={"nothing": 1}, **LOUD_RULE)
    assert "no class 'Quiet'" in refusal(source=LOUD, **{"class": "Quiet"})
    assert "no class 'Path'" in refusal(module="pathlib", **{"class": "Path"})
    assert "class" in refusal(source=LOUD, **{"class": "__import__('os')"})
    assert "at most 262144" in refusal(source="#" * 300_000, **{"class": "Loud"})


@pytest.mark.ci
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("clock = True", "watches the clock"),
        ("def lookback(self, params): return 10**9", "lookback"),
        ("def merged(self, params): return 'never'", "merge"),
        ("def needed(self, params): return Needs(tuple(map(str, range(1000))))", "collections"),
        ("def needed(self, params): return None", "AttributeError"),
        ("def evaluate(self): pass\n    def __init__(self, x): pass", "cannot be made"),
    ],
)
def test_what_a_class_says_of_itself_is_held_to_bounds(change: str, message: str) -> None:
    assert message in refusal(source=f"{LOUD}\nclass Other(Loud):\n    {change}\n", **{"class": "Other"})


@pytest.mark.ci
def test_a_rule_of_an_installed_package_is_loaded_by_its_module() -> None:
    config = RuleConfig(
        rule="python", params={"module": "watchstep_rules.builtin.gradients.nan_or_inf", "class": "NanOrInf"}
    )
    broken = in_steps(norms("first", [1.0, float("nan")]))
    assert steps_of(all_at_once(config, broken), FIRST) == [1]


FILE = "rules:\n  - rule: python\n    name: loud\n    params: {file: mine/loud.py, class: Loud, params: {threshold: 3.0}}\n"


@pytest.mark.ci
def test_the_source_is_put_in_when_the_rule_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "loud.py").write_text(LOUD, encoding="utf-8")
    (tmp_path / "rules.yaml").write_text(FILE, encoding="utf-8")
    (config,) = rule_file.load(tmp_path / "rules.yaml")
    (tmp_path / "mine" / "loud.py").unlink()
    assert steps_of(all_at_once(config, ROWS), FIRST) == [2, 3]
    assert RuleConfig.model_validate(config.as_data()) == config


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(FILE, encoding="utf-8")
    with pytest.raises(RuleError, match=r"loud\.py: cannot be read"):
        rule_file.load(tmp_path / "rules.yaml")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "loud.py").write_bytes(b"\xff\xfe")
    with pytest.raises(RuleError, match=r"loud\.py: cannot be read"):
        rule_file.load(tmp_path / "rules.yaml")
    (tmp_path / "mine" / "loud.py").write_text("#" * 300_000, encoding="utf-8")
    with pytest.raises(RuleError, match="over the limit of 262144"):
        rule_file.load(tmp_path / "rules.yaml")


def test_a_file_that_is_named_from_afar_is_not_read() -> None:
    with pytest.raises(RuleError, match="is missing"):
        rule_file.parse("rules: [{rule: python, params: {file: /etc/passwd, class: X}}]", "of the request")


@pytest.mark.ci
def test_a_recorder_may_not_upload_a_python_rule(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "loud.py").write_text(LOUD, encoding="utf-8")
    (tmp_path / "rules.yaml").write_text(FILE, encoding="utf-8")
    with pytest.raises(RuleError, match="a recorder may not upload one"):
        rule_file.load_as_data(tmp_path / "rules.yaml")


def test_the_setting_demands_a_level() -> None:
    full = Isolation(rlimits=True, no_new_privs=True, landlock=7, seccomp=True)
    partial = full.model_copy(update={"landlock": 0})
    assert str(full) == "full"
    assert str(partial) == "partial, without landlock"
    try:
        for demand, refused in (
            ("refuse", (full, partial)),
            ("allow_partial", ()),
            ("full_only", (partial,)),
        ):
            confinement.set_demand(demand)  # type: ignore[arg-type]  # an element of the literal
            assert [result for result in (full, partial) if why_not(result)] == list(refused)
    finally:
        confinement.set_demand(None)


@pytest.mark.ci
def test_where_they_are_refused_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loud(threshold=4.5)
    confinement.set_demand(None)  # a service that another test has started in this process sets one
    monkeypatch.setenv(confinement.VARIABLE, "refuse")
    assert "refused here" in refusal(source=LOUD + "#", **{"class": "Loud"})
    rule = config.implementation
    with pytest.raises((RuleError, ValidationError), match="refused here"):
        rule.evaluate(config.parameters, rule.state_type(), Block.empty(), ROWS, 0)
    monkeypatch.setenv(confinement.VARIABLE, "perhaps")
    with pytest.raises(ConfigError, match="perhaps"):
        confinement.demand()


def program(file: str, source: str = LOUD) -> SandboxedRule:
    return SandboxedRule("Loud", file, source, "", 512)


@pytest.mark.ci
def test_a_child_that_was_killed_while_idle_is_replaced_at_once() -> None:
    pool_ = Pool()
    with pool_.child(program("killed.py")) as first:
        pass
    os.kill(first._process.pid, signal.SIGKILL)
    first._process.wait()
    with pool_.child(program("killed.py")) as second:
        assert second.alive
    pool_.close()
    assert not second.alive


@pytest.mark.ci
def test_a_child_that_dies_repeatedly_is_restarted_with_increasing_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dies = program("dies.py", HEAD + "os._exit(7)")
    now = [1000.0]
    monkeypatch.setattr(pool, "_now", lambda: now[0])
    pool_ = Pool()

    def tried() -> str:
        with pytest.raises(DeadError) as caught, pool_.child(dies):
            pass
        return caught.value.what

    for pause in (1, 2, 4):
        assert tried().endswith("its process ended with 7")
        now[0] += pause - 0.1
        assert "times in a row, started again in" in tried()
        now[0] += 0.2


@pytest.mark.ci
def test_a_death_for_one_project_delays_no_other_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_now", lambda: 1000.0)
    pool_ = Pool()

    def attempt(project: str) -> None:
        with on_behalf_of(project), pool_.child(program("exits.py", HEAD + "os._exit(7)"), culprit="query"):
            pass

    for project in ("a", "b"):
        with pytest.raises(DeadError, match=r"its process ended with 7(?!;)"):
            attempt(project)
    with pytest.raises(DeadError, match="started again in"):
        attempt("a")


@pytest.mark.ci
def test_only_some_children_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_IDLE", 2)
    pool_ = Pool()
    children: list[Child] = []
    for number in range(pool.MAX_IDLE + 2):
        with pool_.child(program(f"{number}.py")) as child:
            children.append(child)
    assert [child.alive for child in children] == [False] * 2 + [True] * pool.MAX_IDLE
    pool_.close()
    assert not any(child.alive for child in children)


@pytest.mark.ci
def test_a_forked_process_leaves_its_parents_children_alone() -> None:
    pool_ = Pool()
    with pool_.child(program("forked.py")) as child:
        pass
    pid = os.fork()
    if not pid:
        pool_.forget()
        os._exit(len(pool_._idle))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert child.alive
    with pool_.child(program("forked.py")) as again:
        assert again is child
    pool_.close()


@pytest.mark.ci
def test_a_program_that_cannot_be_loaded_is_not_retried_at_once() -> None:
    pool_ = Pool()
    for message in ("no class 'Loud'", "started again in"):
        with pytest.raises(DeadError, match=message), pool_.child(program("empty.py", "x = 1")):
            pass


LARGE = (
    HEAD
    + """
class TakeParams(Params):
    body: str


class Take(Rule[TakeParams, State]):
    name, summary, merge, needs = "take", "takes memory", "watermark", Needs(collections=())

    def evaluate(self, params, state, context, block, now):
        names = dict(globals())
        exec(params.body, names)
        return state, []
"""
)


def take(body: str, memory_mb: int) -> Outcome:
    return all_at_once(python(LARGE, "Take", params={"body": body}, memory_mb=memory_mb), ROWS)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say how much is in use")
def test_the_bound_on_memory_is_what_it_says() -> None:
    assert take("data = bytearray(32 << 20)", 64).memory.health is RuleHealth.OK
    for body in ("data = bytearray(80 << 20)", "data = np.ones(10 << 20)"):
        result = take(body, 64)
        assert (result.memory.health, "MemoryError" in result.memory.problem) == (RuleHealth.ERROR, True), (
            body
        )
    assert take("data = bytearray(200 << 20)", 256).memory.health is RuleHealth.OK


@pytest.mark.ci
def test_a_rule_that_needs_more_memory_than_the_limit_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool.POOL, "memory_mb", 128)
    result = take("data = 1", 256)
    assert result.memory.health is RuleHealth.ERROR
    assert "memory_mb = 256, over the 128 MiB that a rule may have here" in result.memory.problem
    assert "WATCHSTEP_RULE_MEMORY_MB" in result.memory.problem
    assert take("data = 1", 128).memory.health is RuleHealth.OK


FLOOD = """
from watchstep_rules.custom.sandbox.protocol import _HEAD
text = b'{"document": {"state": {"x": [' + b"[]," * (10 << 20) + b'[]]}, "version": 1}}'
data = memoryview(_HEAD.pack(len(text), 0) + text)
for number in range(3, 12):
    try:
        while data:
            data = data[os.write(number, data):]
    except OSError:
        pass
"""


@pytest.mark.ci
def test_a_long_reply_costs_the_parent_no_memory() -> None:
    """30 MB of JSON that are 857 MiB when they are parsed."""
    calm = take("pass", 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = take(FLOOD, 512)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 * 1024  # KiB
    assert calm.memory.health is RuleHealth.OK
    assert "over the limit" in result.memory.problem


def test_many_findings_with_long_messages_come_through() -> None:
    rows = concatenate([replace(ROWS, worker=ROWS.worker + worker) for worker in range(500)])
    source = LOUD.replace('merge = "watermark"', 'merge = "per_worker"').replace(
        " is loud", " is " + "loud" * 100
    )
    outcome = all_at_once(python(source, "Loud", params={"threshold": -1.0, "over": 1}, seconds=120), rows)
    assert outcome.memory.health is RuleHealth.OK, outcome.memory.problem
    assert len(outcome.findings) == len(rows)
    assert {len(finding.message) for finding in outcome.findings} <= {len(FIRST) + 404, len(SECOND) + 404}


@pytest.mark.ci
def test_only_so_many_children_work_at_once() -> None:
    pool_ = Pool({"rules": 2, "checks": 1, "queries": 1})
    entered = threading.Event()

    def third() -> Child:
        entered.set()
        with pool_.child(program("third.py")) as child:
            return child

    with ThreadPoolExecutor(1) as threads:
        with pool_.child(program("first.py")) as first, pool_.child(program("second.py")) as second:
            waiting = threads.submit(third)
            assert entered.wait(60)
            with pool_.child(program("first.py"), "queries") as query:  # a share of its own
                refused = "all 1 processes for queries are at work"
                with pytest.raises(BusyError, match=refused), pool_.child(program("first.py"), "queries"):
                    pass
            assert len({child.pid for child in (first, second, query)}) == 3
            assert not waiting.done()
        assert waiting.result(60).program == program("third.py")
    pool_.close()


ORPHANED = """
import sys
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.custom.sandbox.process import SandboxedRule

source = "import time" + chr(10) + "while True: pass"
import threading
from watchstep_rules.custom.sandbox import process

real = process.Child._confined

def confined(self):
    isolation = real(self)
    print(self.pid, flush=True)
    return isolation

process.Child._confined = confined
process._LOAD_SECONDS = 600.0

def start():
    with POOL.child(SandboxedRule("X", "x.py", source, "", 512)):
        pass

threading.Thread(target=start).start()
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_children_die_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANED], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            poll = select.poll()
            poll.register(child, select.POLLIN)
            assert poll.poll(0) == []
            parent.kill()
            assert poll.poll(60_000) != []
        finally:
            os.close(child)


@pytest.mark.ci
def test_a_child_outlives_the_thread_that_started_it() -> None:
    pool_ = Pool()
    pids: list[int] = []

    def ask() -> None:
        with pool_.child(program("thread.py")) as child:
            pids.append(child.pid)

    for _ in range(2):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert pids[0] == pids[1]
    pool_.close()
