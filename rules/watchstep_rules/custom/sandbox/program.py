"""Inside the child: loads the class of a Python rule, from source or from a module, and answers requests.

`RuleTime` limits how long the SQL and Python rules of a run may take together in one evaluation. A user's rule may take seconds per
step, and an evaluation may cover hundreds of steps; without a shared limit one run would occupy a worker for minutes.
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
    arrays_from_bytes,
    from_bytes,
    pack_findings,
)
from watchstep_rules.rule import AnyRule, Rule, State, TensorNeeds
from watchstep_rules.saved_block import SavedBlock, empty_like

MAX_DESCRIBED_PARAMS = 100
"""Limit of described parameters of a class."""

MAX_DESCRIBED_TEXT = 1000
"""Longest described value, in characters."""

_MAX_DESCRIBED_NUMBER = 2**63

_now = time.monotonic


@dataclass
class RuleTime:
    """The time limit of one evaluation. Not thread-safe: an evaluation runs its rules one after the other.

    Attributes:
        limit: limit, in seconds.
        limited: what the limit applies to, for the error.
        hint: how to avoid the error.
        outer: the limit of more rules, which applies, too.
        spent: seconds used by rules so far.
    """

    limit: float
    limited: str = "the SQL and Python rules of the run"
    hint: str = "make the rules faster, or raise WATCHSTEP_RULE_SECONDS"
    outer: RuleTime | None = None
    spent: float = 0.0
    _started: float | None = field(default=None, repr=False)

    @property
    def left(self) -> float:
        """Remaining seconds, also while a rule runs; negative once the limit is exceeded."""
        running = 0.0 if self._started is None else _now() - self._started
        own = self.limit - self.spent - running
        return own if self.outer is None else min(own, self.outer.left - running)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Count the time of the ``with`` block."""
        self._started = _now()
        try:
            yield
        finally:
            seconds = _now() - self._started
            self._started = None
            self.add(seconds)

    def add(self, seconds: float) -> None:
        """Count time of rules."""
        self.spent += seconds
        if self.outer is not None:
            self.outer.add(seconds)


_current: ContextVar[RuleTime | None] = ContextVar("_current", default=None)


@contextmanager
def limited_rule_time(
    seconds: float, limited: str = RuleTime.limited, hint: str = RuleTime.hint
) -> Iterator[RuleTime]:
    """Limit the total time of SQL and Python rules in the ``with`` block.

    Within another such block both limits apply, and the time counts in both.

    Args:
        seconds: limit, in seconds.
        limited: what the limit applies to, for the error.
        hint: how to avoid the error.
    """
    rule_time = RuleTime(seconds, limited, hint, _current.get())
    token = _current.set(rule_time)
    try:
        yield rule_time
    finally:
        _current.reset(token)


@contextmanager
def rule_time_charged() -> Iterator[None]:
    """Count the time of the ``with`` block if there is a limit."""
    rule_time = _current.get()
    if rule_time is None:
        yield
    else:
        with rule_time.charged():
            yield


def rule_time_left() -> float:
    """Return the remaining seconds; infinity without a limit."""
    rule_time = _current.get()
    return math.inf if rule_time is None else rule_time.left


def out_of_time(called: str) -> RuleError:
    """Return the error of a rule that did not run, or did not finish, because the limit was reached."""
    rule_time = _current.get() or RuleTime(0.0)
    if rule_time.outer is not None and rule_time.outer.left <= 0:
        rule_time = rule_time.outer
    return RuleError(
        f"{called}: {rule_time.limited} took over {rule_time.limit:g} s in one evaluation", rule_time.hint
    )


MODULE = "watchstep_user_rule"
_PARTS_OF_ROWS = 2
_Answer = tuple[dict[str, Any], bytes]


class ProgramError(Exception):
    """The program failed; the message has one line."""


def load(setup: dict[str, Any]) -> AnyRule:
    """Load the class and return an instance.

    Raises:
        ProgramError: the program cannot be run, or has no such rule.
    """
    module = _module(setup)
    name = setup["class"]
    rule_class = getattr(module, name, None)
    if not isinstance(rule_class, type) or not issubclass(rule_class, Rule):
        raise ProgramError(
            f"{setup['file'] or setup['module']} has no class {name!r} that is a watchstep_rules.Rule"
        )
    try:
        return rule_class()
    except TypeError as error:
        raise ProgramError(f"{name} cannot be made: {error}") from error


def answer(rule: AnyRule, request: dict[str, Any], parts: list[bytearray]) -> _Answer:
    """Answer a request: return a document, and the findings as packed by `pack_findings`.

    Raises:
        ProgramError: the parameters are invalid.
    """
    try:
        params = rule.params_type.model_validate(request["params"])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["params", *map(str, first["loc"])])
        raise ProgramError(f"{place}: {first['msg']}") from error
    if request["ask"] == "describe":
        return _described(rule, params), b""
    return _evaluated(rule, params, request, *_blocks(parts))


def _blocks(parts: list[bytearray]) -> tuple[Block, Block]:
    """The context and the block: two parts with rows, or six with the values of saved tensors."""
    if len(parts) == _PARTS_OF_ROWS:
        return from_bytes(parts[0]), from_bytes(parts[1])
    context, block = (
        SavedBlock.of(
            from_bytes(rows),
            [array for array in arrays_from_bytes(values) if array is not None],
            arrays_from_bytes(references),
        )
        for rows, values, references in (parts[:3], parts[3:])
    )
    return context, block


def error_text(error: BaseException) -> str:
    """Format an error in one line, with the line number in the user's program."""
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
    sys.modules[MODULE] = module  # pydantic resolves the names of annotations here
    code = compile(setup["source"], f"<{setup['file'] or 'rule'}>", "exec")
    exec(code, module.__dict__)  # noqa: S102 - the purpose of this confined process
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
        "tensors": None if needs.tensors is None else _described_tensors(rule, params, needs.tensors),
        "params": _described_params(rule, params),
    }


def _described_params(rule: AnyRule, params: Any) -> dict[str, bool | int | float | str]:
    """Return the parameters that are numbers, truth values or short texts, with their values; also those that are not set."""
    described: dict[str, bool | int | float | str] = {}
    for name, declared in rule.params_type.model_fields.items():
        value = getattr(params, name)
        if (
            isinstance(value, bool)
            or (isinstance(value, int) and abs(value) < _MAX_DESCRIBED_NUMBER)
            or (isinstance(value, float) and math.isfinite(value))
            or (isinstance(value, str) and len(value) <= MAX_DESCRIBED_TEXT)
        ):
            described[declared.alias or name] = value
        if len(described) == MAX_DESCRIBED_PARAMS:
            break
    return described


def _described_tensors(rule: AnyRule, params: Any, tensors: TensorNeeds) -> dict[str, Any]:
    reference = rule.reference(params) if tensors.reference else ""
    return {"every": tensors.every, "modes": list(tensors.modes), "reference": reference}


def _evaluated(rule: AnyRule, params: Any, request: dict[str, Any], context: Block, block: Block) -> _Answer:
    now = request["now"]
    state = rule.state_type()
    if request["state"] is not None:
        if request["version"] == rule.version:
            state = rule.state_type.model_validate(request["state"])
        else:  # state of another version: rebuilt from the lookback
            state, _ = rule.evaluate(params, state, empty_like(context), context, now)
    state, findings = rule.evaluate(params, state, context, block, now)
    rows = {
        (int(block.step[row]), int(block.worker[row]), block.mode_name(row), block.info(row).name): row
        for row in reversed(range(len(block)))
    }
    found_rows = []
    for finding in findings:
        row = rows.get((finding.step, finding.worker, finding.mode, finding.tensor))
        if row is None:
            raise ProgramError(
                f"a finding names step {finding.step}, tensor {finding.tensor!r}: no row of the block"
            )
        found_rows.append(FoundRow(row, float(finding.value), float(finding.threshold), finding.message))
    payload = pack_findings(found_rows)
    if len(payload) > MAX_FINDINGS:
        raise ProgramError(
            f"{len(found_rows)} findings take {len(payload)} bytes, at most {MAX_FINDINGS} are taken"
        )
    document = {
        "version": rule.version,
        "state": _kept(rule, state),
        "problem": str(rule.problem(state))[:MAX_MESSAGE],
    }
    return document, payload


def _kept(rule: AnyRule, state: State) -> Any:
    """Return the state as JSON. JSON has no NaN or infinity: they become strings that only a float field reads back."""
    text = state.model_dump_json()
    data = json.loads(text)
    if any(word in text for word in ('"NaN"', '"Infinity"', '"-Infinity"')):
        reloaded = rule.state_type.model_validate(data)
        if _become_text(state.model_dump(), reloaded.model_dump()):
            raise ProgramError("its state has NaN or infinity where no float is declared")
    return data


def _become_text(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return any(_become_text(value, after.get(key)) for key, value in before.items())
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return any(map(_become_text, before, after))
    return isinstance(before, float) and isinstance(after, str)
