"""Python rules: classes that users write, executed in a confined process.

The source is read once, when the rule file is loaded from its folder, and becomes part of the rule config. The config can then be
stored in a database and judged on another machine. Sources are refused from clients that may not upload programs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from watchstep.errors import ConfigError, RuleError
from watchstep.format.block import Block, concatenate
from watchstep.format.tensors import Mode
from watchstep_rules.custom.sandbox.confinement import Isolation, why_not
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.custom.sandbox.process import SandboxedRule
from watchstep_rules.custom.sandbox.program import (
    MAX_DESCRIBED_PARAMS,
    MAX_DESCRIBED_TEXT,
    out_of_time,
    rule_time_charged,
    rule_time_left,
)
from watchstep_rules.custom.sandbox.protocol import (
    MAX_FINDINGS,
    SHORT,
    FrameLimits,
    arrays_to_bytes,
    kept,
    to_bytes,
    unpack_findings,
)
from watchstep_rules.rule import Finding, Merge, Needs, Params, Rule, State, TensorNeeds, finding_at
from watchstep_rules.saved_block import SavedBlock
from watchstep_rules.signals.nonfinite import has_elements

NOT_FROM_RECORDERS = "a recorder may not upload one; add its rule file to the service"
"""Recorders must not be able to run programs where runs are evaluated."""

_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)
_refusal: ContextVar[str] = ContextVar("_refusal", default="")


@contextmanager
def sources_from(folder: str | Path) -> Iterator[None]:
    """In the ``with`` block, the ``file`` of a rule config is relative to this folder, and is read."""
    token = _folder.set(Path(folder))
    try:
        yield
    finally:
        _folder.reset(token)


@contextmanager
def no_programs(reason: str) -> Iterator[None]:
    """In the ``with`` block, Python rules are rejected for a reason; an empty reason allows them."""
    token = _refusal.set(reason)
    try:
        yield
    finally:
        _refusal.reset(token)


def with_source(rule: str, params: dict[str, Any]) -> dict[str, Any]:
    """A rule's parameters with the source of the file, if it is a Python rule with a file.

    Raises:
        ValueError: Python rules are rejected here, or the file cannot be read.
    """
    if rule != Python.name:
        return params
    if _refusal.get():
        raise ValueError(f"a Python rule: {_refusal.get()}")
    folder, file = _folder.get(), params.get("file")
    if folder is None or "source" in params or not isinstance(file, str) or not file:
        return params
    return {**params, "source": _read(folder / Path(file).expanduser())}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            data = opened.read(4 * MAX_SOURCE + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {path}: cannot be read ({error})") from error
    if len(text) > MAX_SOURCE:
        raise ValueError(f"file {path}: over the limit of {MAX_SOURCE} characters")
    return text


MAX_SOURCE = 256 * 1024
"""Longest source, in characters."""

MAX_STATE = 1024 * 1024
"""Largest state, as JSON."""

MAX_VERSION = 2**31
"""Highest version of a class."""

_REPLY = FrameLimits(SHORT.document, MAX_FINDINGS)
_MAX_WHOLE = 2**128
_MAX_ROWS = 20_000
_MAX_MESSAGE = 500
_MEBIBYTE = 1024 * 1024
_DESCRIBE_SECONDS = 10.0
_MOST_DESCRIBED = 10_000
_Name = Annotated[str, StringConstraints(max_length=200)]
_Text = Annotated[str, StringConstraints(max_length=MAX_DESCRIBED_TEXT)]
_Words = tuple[Annotated[str, StringConstraints(min_length=1, max_length=1000)], ...]


class TensorDescription(BaseModel):
    """The full tensors that a class needs: `watchstep_rules.rule.TensorNeeds`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    every: int = Field(ge=1, lt=2**31)
    modes: tuple[Mode, ...] = Field(max_length=4)
    reference: str = Field("", max_length=128)

    @property
    def needs(self) -> TensorNeeds:
        """As needs of a rule."""
        return TensorNeeds(self.every, self.modes, reference=bool(self.reference))


class RuleDescription(BaseModel):
    """The declarations of a class for given parameters. They come from the child process and are validated."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=False)

    version: int = Field(ge=0, le=MAX_VERSION)
    clock: bool
    merge: Merge
    lookback: int = Field(ge=0, le=100_000)
    collections: _Words = Field(max_length=100)
    roles: _Words = Field(max_length=100)
    probes: _Words = Field(max_length=64)
    histograms: bool = False
    tensors: TensorDescription | None = None
    params: dict[_Name, bool | int | float | _Text] = Field(
        default_factory=dict, max_length=MAX_DESCRIBED_PARAMS
    )


_DESCRIBED: dict[str, tuple[RuleDescription, Isolation]] = {}


class PythonParams(Params):
    """Parameters of `Python`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    file: str = Field("", max_length=500, description="The file of the class, relative to the rule file.")
    source: str = Field(
        "", max_length=MAX_SOURCE, description="The text of the file; set when the rule file is loaded."
    )
    module: str = Field(
        "", max_length=200, description="A module of an installed package, instead of a file."
    )
    class_name: str = Field(
        alias="class", pattern=r"^[A-Za-z_]\w{0,199}$", description="The name of the class."
    )
    params: dict[str, Any] = Field(default_factory=dict, description="The parameters of the class.")
    memory_mb: int = Field(512, ge=64, le=16384, description="Limit of memory, in MiB.")
    seconds: float = Field(
        10.0, gt=0, le=300, description="Limit of seconds for 20,000 rows, or for a step with more rows."
    )

    _about: RuleDescription = PrivateAttr()
    _isolation: Isolation = PrivateAttr()

    @model_validator(mode="after")
    def _can_be_run(self) -> PythonParams:
        if self.module and (self.source or self.file):
            raise ValueError("set file or module, not both")
        if not self.module and not self.source:
            raise ValueError(
                f"the source of {self.file!r} is missing: it is set when a rule file is loaded from its folder"
                if self.file
                else "set file or module"
            )
        try:
            self._about, self._isolation = described(self.program, json.dumps(self.params, sort_keys=True))
        except (RuleError, ConfigError) as error:
            raise ValueError(error.what) from error
        return self

    @property
    def program(self) -> SandboxedRule:
        """The program that the child process runs."""
        return SandboxedRule(self.class_name, self.file, self.source, self.module, self.memory_mb)

    @property
    def about(self) -> RuleDescription:
        """The declarations of the class."""
        return self._about

    @property
    def isolation(self) -> Isolation:
        """The isolation of the process that returned the declarations."""
        return self._isolation


class PythonState(State):
    """State of `Python`: the state of the class, its version, its problem, and the isolation of its last process."""

    version: int = 0
    data: dict[str, Any] | None = None
    problem: str = ""
    isolation: Isolation | None = None


class Python(Rule[PythonParams, PythonState]):
    """Fires for the findings of a custom class: a `watchstep_rules.Rule`, with the same contract as built-in rules.

    The class runs in a child process without network, files, environment or programs, with limits of memory and time. The service never
    imports it. Its ``needs``, ``merge`` and ``lookback`` apply; only built-in rules may watch the clock.
    """

    name = "python"
    summary = "a custom Python class reports findings"
    needs = Needs(collections=())
    merge = "watermark"

    def lookback(self, params: PythonParams) -> int:
        """The lookback of the class."""
        return params.about.lookback

    def needed(self, params: PythonParams) -> Needs:
        """The needs of the class."""
        about = params.about
        return Needs(
            about.collections,
            about.roles,
            about.probes,
            histograms=about.histograms,
            tensors=None if about.tensors is None else about.tensors.needs,
        )

    def reference(self, params: PythonParams) -> str:
        """The reference run of the class."""
        return "" if params.about.tensors is None else params.about.tensors.reference

    def merged(self, params: PythonParams) -> Merge:
        """The merge mode of the class."""
        return params.about.merge

    def problem(self, state: PythonState) -> str:
        """The problem of the class."""
        return state.problem

    def conclusive(self, params: PythonParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, because the values that the class uses are not known."""
        return has_elements(block)

    def evaluate(
        self, params: PythonParams, state: PythonState, context: Block, block: Block, now: int
    ) -> tuple[PythonState, list[Finding]]:
        """Send the block to the child process in parts of whole steps, which split invariance allows.

        Raises:
            RuleError: the class failed, exceeded a limit, or returned an invalid result.
        """
        findings: list[Finding] = []
        _check_values(params, context, block)
        POOL.check_memory(params.program.called, params.memory_mb)
        if rule_time_left() <= 0:
            raise out_of_time(params.program.called)
        with rule_time_charged(), POOL.child(params.program) as child:
            reason = why_not(child.isolation)
            if reason:
                raise RuleError(
                    f"{params.program.called}: {reason}", "see docs/guides/python-rules.md, 'Isolation'"
                )
            for part in _parts(block, params.about.merge):
                request = {
                    "ask": "evaluate", "params": params.params, "version": state.version, "state": state.data, "now": now,
                }  # fmt: skip
                seconds = min(params.seconds, rule_time_left())
                if seconds <= 0:
                    raise out_of_time(params.program.called)
                reply = child.request(request, (*_sent(context), *_sent(part)), seconds, _REPLY)
                state = _state(params, reply.document, child.isolation)
                findings.extend(_findings(params, reply.payload, part))
                if not isinstance(part, SavedBlock):
                    context = concatenate([context, part]).tail(params.about.lookback)
        return state, findings


def _check_values(params: PythonParams, *blocks: Block) -> None:
    """Check that the values of saved tensors fit into the memory of the class.

    Raises:
        RuleError: they do not.
    """
    size = sum(
        array.nbytes
        for block in blocks
        if isinstance(block, SavedBlock)
        for array in (*block.values, *block.references)
        if array is not None
    )
    if size > params.memory_mb * _MEBIBYTE:
        raise RuleError(
            f"{params.program.called}: the saved tensors of this evaluation have {size / _MEBIBYTE:.0f} MiB, which exceeds its memory_mb of "
            f"{params.memory_mb}",
            "raise memory_mb, or restrict the rule config's 'tensors'",
        )


def _sent(block: Block) -> tuple[bytes, ...]:
    """A block as the parts of a message: its rows and, for saved tensors, their values."""
    if isinstance(block, SavedBlock):
        return to_bytes(block), arrays_to_bytes(block.values), arrays_to_bytes(block.references)
    return (to_bytes(block),)


def described(program: SandboxedRule, params: str) -> tuple[RuleDescription, Isolation]:
    """The declarations of a class, and the isolation of its process; the parameters of the class are also checked.

    The result is cached without the program: a config is checked often, and reading it must not fail because no child process can be
    started at that moment.

    Raises:
        RuleError: the class cannot run, or its declarations are not valid.
        ConfigError: the setting for Python rules is not known.
    """
    key = sha256(repr((program, params)).encode()).hexdigest()
    description = _DESCRIBED.get(key)
    if description is None:
        description = _describe(program, params)
        if len(_DESCRIBED) >= _MOST_DESCRIBED:
            _DESCRIBED.clear()
        _DESCRIBED[key] = description
    return description


def _describe(program: SandboxedRule, params: str) -> tuple[RuleDescription, Isolation]:
    _check_demand(program)
    with POOL.child(program, "checks") as child:
        reply = child.request({"ask": "describe", "params": json.loads(params)}, (), _DESCRIBE_SECONDS)
        isolation = child.isolation
    try:
        about = RuleDescription.model_validate(reply.document)
    except ValidationError as error:
        first = error.errors()[0]
        raise _impossible(program, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if about.clock:
        raise RuleError(f"{program.called}: watches the clock", "set clock = False: only built-in rules may")
    return about, isolation


def _check_demand(program: SandboxedRule) -> None:
    """Check whether Python rules are allowed without starting a process."""
    refused = why_not(Isolation(rlimits=True, no_new_privs=True, landlock=1, seccomp=True))
    if refused:
        raise RuleError(f"{program.called}: {refused}", "see docs/guides/python-rules.md, 'Isolation'")


def _parts(block: Block, merge: Merge) -> list[Block]:
    """The block in parts of some thousand rows: whole steps, of a single worker for ``per_worker`` rules."""
    if len(block) <= _MAX_ROWS or isinstance(block, SavedBlock):
        return [block]  # the bytes of saved tensors are limited
    if merge == "watermark":
        block = block.take(np.argsort(block.step, kind="stable"))
    changes = np.diff(block.step) != 0
    if merge == "per_worker":
        changes |= np.diff(block.worker) != 0
    ends = np.append(np.flatnonzero(changes) + 1, len(block))
    parts, start = [], 0
    while start < len(block):
        fitting = ends[(ends > start) & (ends <= start + _MAX_ROWS)]
        end = int(fitting[-1]) if len(fitting) else int(ends[ends > start][0])
        parts.append(block.take(np.arange(start, end)))
        start = end
    return parts


def _state(params: PythonParams, document: dict[str, Any], isolation: Isolation) -> PythonState:
    data, version = document.get("state"), document.get("version")
    if not isinstance(data, dict) or type(version) is not int or not 0 <= version <= MAX_VERSION:
        raise _impossible(params.program, "its state is no mapping with a version")
    _check_state(params.program, data)
    if len(json.dumps(data)) > MAX_STATE:
        raise _impossible(params.program, f"its state is larger than {MAX_STATE} bytes")
    problem = kept(str(document.get("problem") or "")[:_MAX_MESSAGE])
    return PythonState(version=version, data=data, problem=problem, isolation=isolation)


def _check_state(program: SandboxedRule, data: dict[str, Any]) -> None:
    """Check that the state can be stored: databases reject unpaired surrogates, and JSON has no NaN."""
    waiting: list[Any] = [data]
    while waiting:
        match waiting.pop():
            case dict() as mapping:
                waiting += [*mapping, *mapping.values()]
            case list() as items:
                waiting += items
            case str() as text if text != kept(text):
                raise _impossible(program, "its state has a text with half a character, or a zero")
            case float() as number if not math.isfinite(number):
                raise _impossible(program, "its state has NaN or infinity where no float is declared")
            case int() as number if abs(number) > _MAX_WHOLE:
                raise _impossible(program, "its state has a whole number of more than 128 bits")


def _findings(params: PythonParams, payload: bytearray, block: Block) -> list[Finding]:
    """The findings, each at a row of the block. The description of the row is taken from the block."""
    try:
        entries = unpack_findings(payload, len(block))
    except ValueError as error:
        raise _impossible(params.program, str(error)) from error
    return [
        finding_at(
            Python.name, block, entry.row, value=entry.value, threshold=entry.threshold, message=entry.message
        )
        for entry in entries
    ]


def _impossible(program: SandboxedRule, what: str) -> RuleError:
    return RuleError(f"{program.called}: {what}", "correct the rule")
