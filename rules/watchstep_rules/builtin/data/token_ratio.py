"""Embeddings that are mostly given padding, or one and the same token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import Trail, probe


class TokenRatioParams(Params):
    """Parameters of `TokenRatio`."""

    share: float = Field(
        0.5, gt=0, le=1, description="Share of watched tokens, padding, above which it fires."
    )
    top_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="The same of the most frequent token, whichever it is; not judged if null.",
    )
    window: int = Field(10, ge=1, le=1000, description="Records over which shares are averaged.")


class TokenRatio(Rule[TokenRatioParams, State]):
    """Fires when the mean of ``token_share`` over the last ``window`` records of an embedding is above ``share``.

    The same for ``top_token_share`` and ``top_share``, where that is set. The watched tokens are those of
    ``CaptureConfig(token_values=…)``, or the embedding's ``padding_idx``, or 0. That is SageMaker's NLPSequenceRatio, with
    its token 0 and its 50 percent, but for the mean: one batch of short sentences says little. Padding costs time and
    memory and no more, so the rule is off by default.
    """

    name = "token_ratio"
    summary = "most of an embedding's input is padding"
    needs = Needs(collections=("activations",), roles=("output",), probes=("token_shares",))
    merge = "per_worker"
    usual_causes = (
        "Batches mix short and long sequences, and all are padded to the longest.",
        "Everything is padded to a fixed length that few sequences have.",
        "The tokenizer knows few of the words, and gives the unknown token for the others.",
    )
    what_to_try = (
        "Put sequences of like length into one batch.",
        "Pad to the longest of the batch, or pack several sequences into one row.",
        "Look at a few tokenised sentences.",
    )

    def lookback(self, params: TokenRatioParams) -> int:
        """The records that are averaged."""
        return params.window - 1

    def conclusive(self, params: TokenRatioParams, block: Block) -> NDArray[np.bool_]:
        """Rows whose tokens were counted."""
        return has_probe(block, "token_share", "top_token_share")

    def evaluate(
        self, params: TokenRatioParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each record by the mean of those up to it."""
        if "token_share" not in block.probes:
            return state, []
        context, block = _of_embeddings(context, block)
        watched = _mean(context, block, "token_share", params.window)
        top = _mean(context, block, "top_token_share", params.window)
        limit = np.inf if params.top_share is None else params.top_share
        findings = []
        for row in np.flatnonzero((watched > params.share) | (top > limit)).tolist():
            said, value, threshold = (
                ("padding or another watched token", watched[row], params.share)
                if watched[row] > params.share
                else ("one and the same token", top[row], limit)
            )
            message = (
                f"{value:.0%} of what the embedding of {block.info(row).name} was given over {params.window} records "
                f"is {said}, more than {threshold:.0%}"
            )
            findings.append(
                finding_at(
                    self.name, block, row, value=float(value), threshold=float(threshold), message=message
                )
            )
        return state, findings


def _of_embeddings(context: Block, block: Block) -> tuple[Block, Block]:
    """All rows of tensors that have such a share in any row of the block."""
    place = np.unique(block.tensor[np.isfinite(probe(block, "token_share"))])
    names = {block.catalogue[index].name for index in place.tolist()}

    def chosen(rows: Block) -> Block:
        return view(rows, np.flatnonzero(rows.mask_of_tensors([i.name in names for i in rows.catalogue])))

    return chosen(context), chosen(block)


def _mean(context: Block, block: Block, name: str, window: int) -> Floats:
    """Of the last records, a row's own included; NaN where there are fewer."""
    trail = Trail.of(context, block)
    column = trail.column(lambda rows: probe(rows, name))
    total = np.zeros(len(block))
    for back in range(window):
        total += trail.back(column, back)
    return total / window
