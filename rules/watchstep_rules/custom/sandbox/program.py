"""Inside the child: loads the class of a Python rule, from source or from a module, and answers requests.

`RuleTime` limits how long the SQL and Python rules of a run may take together in one evaluation. A user's rule may take seconds per
step, and an evaluation may judge hundreds of steps; without a shared limit one run would occupy a worker for minutes.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from watchstep.errors import RuleError
from watchstep.format.block import Block
from watchstep_rules.custom.sandbox.protocol import (
    MAX_FINDINGS,
    MAX_MESSAGE,
    FoundRow,
    from_bytes,
    pack_findings,
)
from watchstep_rules.rule import AnyRule, Rule, State

_now = time.monotonic


@dataclass
class RuleTime:
    """Not thread-safe: one evaluation judges its rules one after the other.

    Attributes:
        limit: seconds.
        spent: seconds that rules have taken so far.
    """

    limit: float
    spent: float = 0.0
    _started: float | None = field(default=None, repr=False)

    @property
    def left(self) -> float:
        """Seconds that are left, also while a rule is judging; below zero once the limit is passed."""
        running = 0.0 if self._started is None else _now() - self._started
        return self.limit - self.spent - running

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Count the time of the ``with`` block."""
        self._started = _now()
        try:
            yield
        finally:
            self.spent += _now() - self._started
            self._started = None


_current: ContextVar[RuleTime | None] = ContextVar("_current", default=None)


@contextmanager
def limited_rule_time(seconds: float) -> Iterator[RuleTime]:
    """In the ``with`` block, SQL and Python rules together may take so many seconds."""
    rule_time = RuleTime(seconds)
    token = _current.set(rule_time)
    try:
        yield rule_time
    finally:
        _current.reset(token)


@contextmanager
def rule_time_charged() -> Iterator[None]:
    """Count the time of the ``with`` block, where there is a limit."""
    rule_time = _current.get()
    if rule_time is None:
        yield
    else:
        with rule_time.charged():
            yield


def rule_time_left() -> float:
    """Seconds that are left; infinity where there is no limit."""
    rule_time = _current.get()
    return math.inf if rule_time is None else rule_time.left


def out_of_time(called: str) -> RuleError:
    """The error of a rule that is not judged, or not to the end, because the limit is reached."""
    rule_time = _current.get()
    limit = 0.0 if rule_time is None else rule_time.limit
    return RuleError(
        f"{called}: the SQL and Python rules of the run took over {limit:g} s in one evaluation",
        "make the rules faster, or raise WATCHSTEP_RULE_SECONDS",
    )


MODULE = "watchstep_user_rule"
_Answer = tuple[dict[str, Any], bytes]


class ProgramError(Exception):
    """The program is at fault, said in one line."""


def load(setup: dict[str, Any]) -> AnyRule:
    """An instance of the class.

    Raises:
        ProgramError: the program cannot be run, or has no such rule.
    """
    module = _module(setup)
    name = setup["class"]
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, Rule):
        raise ProgramError(
            f"{setup['file'] or setup['module']} has no class {name!r} that is a watchstep_rules.Rule"
        )
    try:
        return found()
    except TypeError as error:
        raise ProgramError(f"{name} cannot be made: {error}") from error


def answer(rule: AnyRule, request: dict[str, Any], parts: list[bytearray]) -> _Answer:
    """What the rule says to one request: a document, and its findings as `pack_findings` gives them.

    Raises:
        ProgramError: the parameters are not its.
    """
    try:
        params = rule.params_type.model_validate(request["params"])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["params", *map(str, first["loc"])])
        raise ProgramError(f"{place}: {first['msg']}") from error
    if request["ask"] == "describe":
        return _described(rule, params), b""
    return _evaluated(rule, params, request, *map(from_bytes, parts))


def error_text(error: BaseException) -> str:
    """An error in one line, with the line of the user's program where it came from."""
    if isinstance(error, ProgramError):
        return str(error)[:MAX_MESSAGE]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [str(frame.lineno) for frame in frames if frame.filename.startswith("<")]
    place = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}"[: MAX_MESSAGE - 20] + place


def _module(setup: dict[str, Any]) -> types.ModuleType:
    if setup["module"]:
        return importlib.import_module(setup["module"])
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module  # where pydantic looks for the names of annotations
    code = compile(setup["source"], f"<{setup['file'] or 'rule'}>", "exec")
    exec(code, module.__dict__)  # noqa: S102 - what this confined process is there for
    return module


def _described(rule: AnyRule, params: Any) -> dict[str, Any]:
    needs = rule.needed(params)
    return {
        "name": getattr(rule, "name", type(rule).__name__),
        "version": rule.version,
        "clock": rule.clock,
        "merge": rule.merged(params),
        "lookback": rule.lookback(params),
        "collections": list(needs.collections),
        "roles": list(needs.roles),
        "probes": list(needs.probes),
        "histograms": needs.histograms,
    }


def _evaluated(rule: AnyRule, params: Any, request: dict[str, Any], context: Block, block: Block) -> _Answer:
    now = request["now"]
    state = rule.state_type()
    if request["state"] is not None:
        if request["version"] == rule.version:
            state = rule.state_type.model_validate(request["state"])
        else:  # of another version: made anew from what is looked back on
            state, _ = rule.evaluate(params, state, Block.empty(), context, now)
    state, findings = rule.evaluate(params, state, context, block, now)
    rows = {
        (int(block.step[row]), int(block.worker[row]), block.mode_name(row), block.info(row).name): row
        for row in reversed(range(len(block)))
    }
    found = []
    for finding in findings:
        row = rows.get((finding.step, finding.worker, finding.mode, finding.tensor))
        if row is None:
            raise ProgramError(
                f"a finding names step {finding.step}, tensor {finding.tensor!r}: no row of the block"
            )
        found.append(FoundRow(row, float(finding.value), float(finding.threshold), finding.message))
    payload = pack_findings(found)
    if len(payload) > MAX_FINDINGS:
        raise ProgramError(
            f"{len(found)} findings take {len(payload)} bytes, at most {MAX_FINDINGS} are taken"
        )
    document = {
        "version": rule.version,
        "state": _kept(rule, state),
        "problem": str(rule.problem(state))[:MAX_MESSAGE],
    }
    return document, payload


def _kept(rule: AnyRule, state: State) -> Any:
    """The state as JSON, which has no NaN and no infinity: they are texts that only a field of floats reads back."""
    text = state.model_dump_json()
    data = json.loads(text)
    if any(word in text for word in ('"NaN"', '"Infinity"', '"-Infinity"')):
        again = rule.state_type.model_validate(data)
        if _become_text(state.model_dump(), again.model_dump()):
            raise ProgramError("its state has NaN or infinity where no float is declared")
    return data


def _become_text(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return any(_become_text(value, after.get(key)) for key, value in before.items())
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return any(map(_become_text, before, after))
    return isinstance(before, float) and isinstance(after, str)
