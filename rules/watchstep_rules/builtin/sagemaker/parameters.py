"""Shared parts of the SageMaker rules: parameters and tensor names as SageMaker spells them, and rules that delegate to a built-in rule.

Parameter names and defaults follow the developer guide and ``smdebug-rulesconfig``. Values may be text, as ``rule_parameters`` accepts
them: ``"20.0"``, ``"True"``, ``"losses, weights"``.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.tensors import SYSTEM, TensorInfo
from watchstep_rules.rule import AnyRule, Finding, Needs, Params, Rule, State
from watchstep_rules.saved_block import SavedBlock
from watchstep_rules.signals import tensor_selection
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import rows_where

_MOST_WORDS = 100
_SET_BY_SAGEMAKER = frozenset({"base_trial", "rule_to_invoke", "action_json", "source_s3_uri"})
_RENAMED = {"outputs": "outputs", "optimizer_variables": "optimizer_state", "sm_metrics": "metrics"}
"""Collections with another name at Amazon."""

_ALL_SAVED = ("weights", "biases", "gradients", "activations", "losses", "metrics")
"""Collections of full tensors that are saved for Amazon's collection ``all``."""


def _words(value: Any) -> Any:
    """Amazon accepts a list or a comma-separated string."""
    return [word for part in value.split(",") if (word := part.strip())] if isinstance(value, str) else value


def _patterns(value: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for pattern in value or ():
        tensor_selection.check(pattern)
    return value


Words = Annotated[
    tuple[Annotated[str, StringConstraints(max_length=256)], ...],
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
    int, Field(60_000_000, ge=1, description="Accepted without effect: rows are judged as they arrive.")
]


class AmazonParams(Params):
    """Base class of the parameters of SageMaker rules.

    Attributes:
        amazon: the name of the rule at Amazon.
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
            return f"{name!r} is set by SageMaker and not supported here: remove it"
        fields = list(cls.model_fields)
        close = [field for field in fields if field.startswith(name)] or difflib.get_close_matches(
            name, fields, n=2
        )
        suggestion = f": did you mean {' or '.join(close)}?" if close else ";"
        accepted = ", ".join(fields) or "no parameters"
        return f"{cls.amazon or cls.__name__} has no parameter {name!r}{suggestion} It takes {accepted}"


class ScopedParams(AmazonParams):
    """Parameters of a rule that judges the union of collections and of tensors selected by name."""

    collection_names: Words | None = Field(
        None, description="Collections of tensors to judge, in addition to tensor_regex."
    )
    tensor_regex: Patterns | None = Field(
        None,
        description="Tensors to judge, by Watchstep's or SageMaker's name: any of these patterns, matched from the start.",
    )

    @property
    def names_tensors(self) -> bool:
        """Whether tensors are named; otherwise the rule judges its default tensors."""
        return self.collection_names is not None or self.tensor_regex is not None

    def needs_of(self, own: Needs) -> Needs:
        """The needs of a rule: its default tensors, or all tensors if some are named, of which it selects the named ones."""
        if not self.names_tensors:
            return own
        return Needs((), probes=own.probes, histograms=own.histograms)

    def saved_collections(self, *own: str) -> tuple[str, ...]:
        """For a rule over full tensors: the collections of which they are saved, by default the given ones."""
        names = [_RENAMED.get(name, name) for name in self.collection_names or own]
        return _ALL_SAVED if "all" in names else tuple(dict.fromkeys(names))

    def rows(self, block: Block) -> NDArray[np.bool_]:
        """Rows to judge, bool of shape (n,)."""
        if not self.names_tensors:
            return rows_where(block, is_recorded)
        return rows_where(block, is_named, self.collection_names or (), self.tensor_regex or ())


def is_recorded(info: TensorInfo) -> bool:
    """Whether a tensor belongs to the program, not to the system samples."""
    return SYSTEM not in info.collections


def is_named(info: TensorInfo, collections: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    """Whether a tensor is in one of the collections, or one of the patterns matches one of its names."""
    chosen = {_RENAMED.get(name, name) for name in collections}
    if not is_recorded(info):
        return False
    return "all" in chosen or not chosen.isdisjoint(info.collections) or is_matched(info, patterns)


def is_matched(info: TensorInfo, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns matches one of a tensor's names."""
    return any(tensor_selection.matches(pattern, name) for pattern in patterns for name in names_of(info))


def names_of(info: TensorInfo) -> tuple[str, ...]:
    """A tensor's name in Watchstep, and its names in SageMaker's hook for PyTorch.

    SageMaker names the output of a module ``relu`` ``relu_output_0`` and its input ``relu_input_0``; the root module is named by its
    class. A rule about the input of an activation accepts both, because the output's row contains its statistics.
    """
    module = info.module or info.module_type
    if info.role == "output" and module:
        return info.name, f"{module}_output_0", f"{module}_input_0"
    if info.role == "input" and module:
        return info.name, f"{module}_input_0"
    if info.role == "gradient":
        return info.name, f"gradient/{info.name.removesuffix(':gradient')}"
    return (info.name,)


def earlier_values(
    context: SavedBlock, block: SavedBlock, keep: int
) -> Iterator[tuple[int, list[SavedValue]]]:
    """Yield each row of a block with the earlier saved values of its series, at most ``keep``, the oldest first."""
    earlier: dict[tuple[str, int, int], deque[SavedValue]] = {}
    for rows, is_judged in ((context, False), (block, True)):
        for row in range(len(rows)):
            key = (rows.info(row).name, int(rows.worker[row]), int(rows.mode[row]))
            values = earlier.setdefault(key, deque(maxlen=keep))
            if is_judged:
                yield row, list(values)
            values.append(SavedValue(int(rows.step[row]), rows.values[row]))


class SavedValue(NamedTuple):
    """The values of a saved tensor at a step."""

    step: int
    values: NDArray[Any]


SaveInterval = Annotated[
    int,
    Field(
        500,
        ge=1,
        lt=2**31,
        description="With full_tensors: steps between saved tensors, as in CollectionConfig.",
    ),
]


class ElementCoverage(State):
    """Whether rows have the probe of elements that a rule needs.

    Attributes:
        measured: whether some row has it.
        lacking: whether some row does not.
    """

    measured: bool = False
    lacking: bool = False

    def after(self, wanted: NDArray[np.bool_], figures: Floats) -> ElementCoverage:
        """Add rows. ``wanted`` selects the rows that should have the figure."""
        has = np.isfinite(figures[wanted])
        return ElementCoverage(
            measured=self.measured or bool(has.any()), lacking=self.lacking or bool((~has).any())
        )

    def problem(self, probe_name: str) -> str:
        """The problem to report if no row has the probe; empty otherwise."""
        if self.measured or not self.lacking:
            return ""
        return (
            f"the recorder did not measure {probe_name}: pass this rule by Hook(rules=…), watchstep run --rules or "
            "Estimator(rules=…), or add the probe to CaptureConfig(probes=…)"
        )


def percent_of(block: Block, part: str, whole: str) -> Floats:
    """One probe as a percentage of another, float64 of shape (n,); NaN if it is not defined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(100 * probe(block, part) / probe(block, whole))


def is_output_of(info: TensorInfo, *kinds: str) -> bool:
    """Whether a tensor is the output of a module or function call of one of these types."""
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

    State, needs, merge, clock and advice are those of the built-in rule. By default parameters with the same name are passed on.

    Attributes:
        inner: the built-in rule.
        fixed: fixed values of further parameters of the built-in rule.
    """

    inner: ClassVar[AnyRule]
    fixed: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Copy the declarations of the built-in rule."""
        super().__init_subclass__(**arguments)
        for name in ("state_type", "needs", "merge", "clock", "usual_causes", "what_to_try"):
            if name not in cls.__dict__ or name == "state_type":
                setattr(cls, name, getattr(cls.inner, name))

    def translated(self, params: P) -> Params:
        """The parameters of the built-in rule."""
        accepted = self.inner.params_type.model_fields
        values = {name: value for name, value in params.model_dump().items() if name in accepted}
        translated: Params = self.inner.params_type(**{**values, **self.fixed})
        return translated

    def lookback(self, params: P) -> int:
        """The lookback of the built-in rule."""
        return self.inner.lookback(self.translated(params))

    def due_ns(self, params: P, state: State) -> int | None:
        """The next tick of the built-in rule."""
        return self.inner.due_ns(self.translated(params), state)

    def problem(self, state: State) -> str:
        """The problem of the built-in rule."""
        return self.inner.problem(state)

    def evaluate(
        self, params: P, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Evaluate the built-in rule; findings have the name of this rule."""
        state, findings = self.inner.evaluate(self.translated(params), state, context, block, now)
        return state, [finding.model_copy(update={"rule": self.name}) for finding in findings]
