"""Shared parts of the SageMaker rules: parameters and tensor names as SageMaker spells them, and rules that delegate to a built-in rule.

Parameter names and defaults follow the developer guide and ``smdebug-rulesconfig``. Values may be text, as ``rule_parameters`` accepts
them: ``"20.0"``, ``"True"``, ``"losses, weights"``.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.tensors import SYSTEM, TensorInfo
from watchstep_rules.rule import AnyRule, Finding, Needs, Params, Rule, State
from watchstep_rules.signals import tensor_selection
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import rows_where

_MOST_WORDS = 100
_SET_BY_SAGEMAKER = frozenset({"base_trial", "rule_to_invoke", "action_json", "source_s3_uri"})
_RENAMED = {"outputs": "outputs", "optimizer_variables": "optimizer_state", "sm_metrics": "metrics"}
"""Collections that Amazon calls otherwise."""


def _words(value: Any) -> Any:
    """Amazon takes a list, or a text with commas."""
    return [word for part in value.split(",") if (word := part.strip())] if isinstance(value, str) else value


def _patterns(value: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for pattern in value or ():
        tensor_selection.check(pattern)
    return value


Words = Annotated[
    tuple[str, ...],
    BeforeValidator(_words, json_schema_input_type=str | list[str]),
    Field(max_length=_MOST_WORDS),
]
Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(_words, json_schema_input_type=str | list[str]),
    AfterValidator(_patterns),
    Field(max_length=_MOST_WORDS),
]
ScanInterval = Annotated[
    int, Field(60_000_000, ge=1, description="Accepted and without effect: rows are judged as they come.")
]


class AmazonParams(Params):
    """Parameters of a rule of Amazon's.

    Attributes:
        amazon: the rule's name at Amazon.
    """

    amazon: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    raise ValueError(cls._unknown(str(name)))
        return data

    @classmethod
    def _unknown(cls, name: str) -> str:
        if name in _SET_BY_SAGEMAKER:
            return f"{name!r} is set by SageMaker, and has no meaning here: leave it out"
        fields = list(cls.model_fields)
        close = [field for field in fields if field.startswith(name)] or difflib.get_close_matches(
            name, fields, n=2
        )
        meant = f": did you mean {' or '.join(close)}?" if close else ";"
        takes = ", ".join(fields) or "no parameters"
        return f"{cls.amazon or cls.__name__} has no parameter {name!r}{meant} It takes {takes}"


class ScopedParams(AmazonParams):
    """Parameters of a rule that takes the union of collections and of tensors by name."""

    collection_names: Words | None = Field(
        None, description="Collections whose tensors are judged, as well as:"
    )
    tensor_regex: Patterns | None = Field(
        None,
        description="Tensors by name, Watchstep's or SageMaker's: any of these expressions, from the start.",
    )

    @property
    def names_tensors(self) -> bool:
        """Whether some are named; else the rule judges its own."""
        return self.collection_names is not None or self.tensor_regex is not None

    def needs_of(self, own: Needs) -> Needs:
        """What a rule is to be given: its own tensors, or all, of which it takes those that are named."""
        if not self.names_tensors:
            return own
        return Needs((), probes=own.probes, histograms=own.histograms)

    def rows(self, block: Block) -> NDArray[np.bool_]:
        """Which rows are judged, bool of shape (n,)."""
        if not self.names_tensors:
            return rows_where(block, is_recorded)
        return rows_where(block, is_named, self.collection_names or (), self.tensor_regex or ())


def is_recorded(info: TensorInfo) -> bool:
    """Whether a tensor is one of the program's, and no figure of the machine."""
    return SYSTEM not in info.collections


def is_named(info: TensorInfo, collections: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    """Whether a tensor is in one of the collections, or one of the expressions matches one of its names."""
    chosen = {_RENAMED.get(name, name) for name in collections}
    if not is_recorded(info):
        return False
    return "all" in chosen or not chosen.isdisjoint(info.collections) or is_matched(info, patterns)


def is_matched(info: TensorInfo, patterns: tuple[str, ...]) -> bool:
    """Whether one of the expressions matches one of a tensor's names."""
    return any(tensor_selection.matches(pattern, name) for pattern in patterns for name in names_of(info))


def names_of(info: TensorInfo) -> tuple[str, ...]:
    """A tensor's name here, and those that SageMaker's hook for PyTorch gives it.

    An output of a module ``relu`` is ``relu_output_0`` there and its input ``relu_input_0``; the root goes by its class. A rule
    about the input of an activation finds it by either, for its figures stand in the output's row.
    """
    module = info.module or info.module_type
    if info.role == "output" and module:
        return info.name, f"{module}_output_0", f"{module}_input_0"
    if info.role == "input" and module:
        return info.name, f"{module}_input_0"
    if info.role == "gradient":
        return info.name, f"gradient/{info.name.removesuffix(':gradient')}"
    return (info.name,)


class ElementCoverage(State):
    """Whether rows had the figures of elements that a rule asks for, and whether some lacked them.

    Attributes:
        measured: some row had them.
        lacking: some row did not.
    """

    measured: bool = False
    lacking: bool = False

    def after(self, wanted: NDArray[np.bool_], figures: Floats) -> ElementCoverage:
        """With rows more; of those that are wanted, which have the figure."""
        has = np.isfinite(figures[wanted])
        return ElementCoverage(
            measured=self.measured or bool(has.any()), lacking=self.lacking or bool((~has).any())
        )

    def problem(self, probe_name: str) -> str:
        """What is said where no row had them; nothing else."""
        if self.measured or not self.lacking:
            return ""
        return (
            f"the recorder did not measure {probe_name}: give it this rule, by Hook(rules=…), watchstep run --rules or "
            "Estimator(rules=…), or name the probe in CaptureConfig(probes=…)"
        )


def percent_of(block: Block, part: str, whole: str) -> Floats:
    """One probe as a percentage of another, float64 of shape (n,); NaN where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(100 * probe(block, part) / probe(block, whole))


def is_output_of(info: TensorInfo, *kinds: str) -> bool:
    """Whether a tensor is the output of a module, or call, of one of these types."""
    return info.role == "output" and info.module_type in kinds


ModeName = Annotated[
    Literal["TRAIN", "EVAL", "GLOBAL"],
    BeforeValidator(
        lambda value: value.rpartition(".")[2].upper() if isinstance(value, str) else value,
        json_schema_input_type=str,
    ),
]


P = TypeVar("P", bound=Params)


class Translated(Rule[P, State]):
    """Delegates to a built-in rule, with that rule's parameters translated from its own.

    State, needs, merge, clock and advice are those of the built-in rule.

    Attributes:
        inner: the built-in rule.
    """

    inner: ClassVar[AnyRule]

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Take what the built-in rule declares."""
        super().__init_subclass__(**arguments)
        for name in ("state_type", "needs", "merge", "clock", "usual_causes", "what_to_try"):
            if name not in cls.__dict__ or name == "state_type":
                setattr(cls, name, getattr(cls.inner, name))

    @abstractmethod
    def translated(self, params: P) -> Params:
        """The other rule's parameters."""

    def lookback(self, params: P) -> int:
        """As the other rule's."""
        return self.inner.lookback(self.translated(params))

    def due_ns(self, params: P, state: State) -> int | None:
        """As the other rule's."""
        return self.inner.due_ns(self.translated(params), state)

    def problem(self, state: State) -> str:
        """As the other rule's."""
        return self.inner.problem(state)

    def evaluate(
        self, params: P, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge as the other rule, under this one's name."""
        state, findings = self.inner.evaluate(self.translated(params), state, context, block, now)
        return state, [finding.model_copy(update={"rule": self.name}) for finding in findings]
