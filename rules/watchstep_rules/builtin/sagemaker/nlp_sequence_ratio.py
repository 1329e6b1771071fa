"""Tokens that make up too much of what an embedding is given."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from watchstep.capture.config import TOKEN_COUNT, TOKENS, element_probe
from watchstep.format.block import Block
from watchstep_rules.builtin.data.token_ratio import TokenRatio
from watchstep_rules.builtin.sagemaker.amazon import (
    AmazonParams,
    ElementCoverage,
    Patterns,
    is_matched,
    is_output_of,
    percent_of,
)
from watchstep_rules.rule import Finding, Needs, Rule, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.tensor_selection import rows_where

_MOST_TOKENS = 16


def _numbers(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int | float) else value


class SagemakerNlpSequenceRatioParams(AmazonParams):
    """Parameters of `SagemakerNlpSequenceRatio`."""

    amazon: ClassVar[str] = "NLPSequenceRatio"
    tensor_regex: Patterns | None = Field(
        None, description="Embeddings by name, Watchstep's or SageMaker's; all where it is left out."
    )
    token_values: Annotated[
        tuple[int, ...],
        BeforeValidator(_numbers, json_schema_input_type=str | int | list[int]),
        Field(min_length=1, max_length=_MOST_TOKENS),
    ] = Field((0,), description="The tokens that are counted, as '3, 0' or a list.")
    token_thresholds_percent: Annotated[
        tuple[float, ...],
        BeforeValidator(_numbers, json_schema_input_type=str | float | list[float]),
        Field(max_length=_MOST_TOKENS),
    ] = Field((50.0, 50.0), validate_default=True, description="Percent that each of them may make up.")

    @field_validator("token_thresholds_percent")
    @classmethod
    def _is_one_each(cls, value: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        tokens = info.data.get("token_values", ())
        if len(value) < len(tokens):
            raise ValueError(f"{len(value)} thresholds for {len(tokens)} token_values: give one for each")
        return value

    @property
    def probes(self) -> tuple[str, ...]:
        """The probes that count each token."""
        return tuple(element_probe(TOKEN_COUNT, token) for token in self.token_values)


class SagemakerNlpSequenceRatio(Rule[SagemakerNlpSequenceRatioParams, ElementCoverage]):
    """Fires when a token of ``token_values`` makes up more than its percentage of what an embedding is given in a step.

    SageMaker's NLPSequenceRatio, with its defaults. Embeddings are found by type; ``tensor_regex`` takes some of them. `token_ratio`
    averages over some steps.
    """

    name = "sagemaker_nlp_sequence_ratio"
    summary = "a token makes up much of an embedding's input, as SageMaker tests it"
    needs = Needs(("activations",), ("output",))
    merge = "per_worker"
    usual_causes = TokenRatio.usual_causes
    what_to_try = TokenRatio.what_to_try
    params_type = SagemakerNlpSequenceRatioParams
    state_type = ElementCoverage

    def needed(self, params: SagemakerNlpSequenceRatioParams) -> Needs:
        """Counts of these tokens."""
        return Needs(self.needs.collections, self.needs.roles, probes=params.probes)

    def problem(self, state: ElementCoverage) -> str:
        """What to do where the recorder did not count."""
        return state.problem("counts of these tokens")

    def conclusive(self, params: SagemakerNlpSequenceRatioParams, block: Block) -> NDArray[np.bool_]:
        """Rows whose tokens were counted."""
        return has_probe(block, *params.probes)

    def evaluate(
        self,
        params: SagemakerNlpSequenceRatioParams,
        state: ElementCoverage,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Judge each record by itself."""
        embeddings = rows_where(block, is_output_of, "Embedding")
        named = np.ones(len(block), np.bool_)
        if params.tensor_regex is not None:
            named = rows_where(block, is_matched, params.tensor_regex)
        findings: dict[int, Finding] = {}
        for token, limit, name in zip(
            params.token_values, params.token_thresholds_percent, params.probes, strict=False
        ):
            share = percent_of(block, name, TOKENS)
            state = state.after(embeddings & named, share)
            for row in np.flatnonzero(named & (share > limit)).tolist():
                message = f"{share[row]:.3g} % of what the embedding of {block.info(row).name} was given is token {token}, {limit:g} % may be"
                findings.setdefault(
                    row,
                    finding_at(
                        self.name, block, row, value=float(share[row]), threshold=limit, message=message
                    ),
                )
        return state, [findings[row] for row in sorted(findings)]
