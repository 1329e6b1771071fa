"""Embeddings with mostly padding, or mostly the same token, as input."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import LaggedRows, probe


class TokenRatioParams(Params):
    """Parameters of `TokenRatio`."""

    share: float = Field(0.5, gt=0, le=1, description="Tolerated share of watched tokens (padding).")
    top_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Tolerated share of the most frequent token, whichever it is; not judged if null.",
    )
    window: int = Field(10, ge=1, le=1000, description="Number of records over which shares are averaged.")


class TokenRatio(Rule[TokenRatioParams, State]):
    """Fires when the mean of ``token_share`` over the last ``window`` records of an embedding is above ``share``.

    The same applies to ``top_token_share`` and ``top_share``, if it is set. The watched tokens are those of
    ``CaptureConfig(token_values=…)``, or the embedding's ``padding_idx``, or 0. This is SageMaker's NLPSequenceRatio with its token 0 and
    its 50 percent, except for the mean: one batch of short sentences is not conclusive. Padding costs only time and memory, so the rule is
    off by default.
    """

    name = "token_ratio"
    summary = "most of an embedding's input is padding"
    needs = Needs(collections=("activations",), roles=("output",), probes=("token_shares",))
    merge = "per_worker"
    usual_causes = (
        "Batches mix short and long sequences, and all are padded to the longest.",
        "All sequences are padded to a fixed length that few of them reach.",
        "The tokenizer knows few of the words, and returns the unknown token for the others.",
    )
    what_to_try = (
        "Batch sequences of similar length.",
        "Pad to the longest sequence of the batch, or pack several sequences into one row.",
        "Look at a few tokenized sentences.",
    )

    def lookback(self, params: TokenRatioParams) -> int:
        """The earlier records of the mean."""
        return params.window - 1

    def conclusive(self, params: TokenRatioParams, block: Block) -> NDArray[np.bool_]:
        """Rows with counted tokens."""
        return has_probe(block, "token_share", "top_token_share")

    def evaluate(
        self, params: TokenRatioParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each record by the mean of the last records up to it."""
        if "token_share" not in block.probes:
            return state, []
        context, block = _of_embeddings(context, block)
        watched = _mean(context, block, "token_share", params.window)
        top = _mean(context, block, "top_token_share", params.window)
        limit = np.inf if params.top_share is None else params.top_share
        findings = []
        for row in np.flatnonzero((watched > params.share) | (top > limit)).tolist():
            tokens, value, threshold = (
                ("padding or another watched token", watched[row], params.share)
                if watched[row] > params.share
                else ("one and the same token", top[row], limit)
            )
            message = (
                f"{value:.0%} of the input of the embedding {block.info(row).name} over {params.window} records "
                f"is {tokens}, more than {threshold:.0%}"
            )
            findings.append(
                finding_at(
                    self.name, block, row, value=float(value), threshold=float(threshold), message=message
                )
            )
        return state, findings


def _of_embeddings(context: Block, block: Block) -> tuple[Block, Block]:
    """The rows of tensors with a token share in any row of the block."""
    place = np.unique(block.tensor[np.isfinite(probe(block, "token_share"))])
    names = {block.catalogue[index].name for index in place.tolist()}

    def chosen(rows: Block) -> Block:
        return view(rows, np.flatnonzero(rows.mask_of_tensors([i.name in names for i in rows.catalogue])))

    return chosen(context), chosen(block)


def _mean(context: Block, block: Block, name: str, window: int) -> Floats:
    """The mean over the last records up to each row; NaN if there are fewer."""
    lagged = LaggedRows.of(context, block)
    column = lagged.column(lambda rows: probe(rows, name))
    total = np.zeros(len(block))
    for rows in range(window):
        total += lagged.lag(column, rows)
    return total / window
