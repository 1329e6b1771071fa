"""What share of the tokens that an embedding is given are padding, or one and the same.

    token_share = tokens that are one of the watched values / tokens
    top_token_share = occurrences of the most frequent token / tokens

Of longer inputs at most 4,096 tokens are looked at, evenly spaced: a share of them has a standard error below one percent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from watchstep.pytorch.probes.on_the_way import OnTheWay
from watchstep.pytorch.probes.samples import views
from watchstep.statistics import Floats

_MOST = 4096


@dataclass(frozen=True)
class _Shares:
    """One row."""

    shares: OnTheWay

    def collect(self) -> dict[str, Floats]:
        watched, top = self.shares.numbers()
        return {"token_share": watched.reshape(1), "top_token_share": top.reshape(1)}


class TokenProbe:
    """Looks at what one embedding is given.

    Attributes:
        applies: whether the module is one.
    """

    def __init__(self, module: nn.Module, values: tuple[int, ...]) -> None:
        """Watch a module.

        Args:
            module: an embedding, or any other.
            values: the watched tokens; the module's ``padding_idx`` where there are none, or 0 where it has none.
        """
        self.applies = isinstance(module, nn.Embedding)
        padding = getattr(module, "padding_idx", None)
        self._values = values or (0 if padding is None else int(padding),)

    @torch.no_grad()
    def look(self, tokens: Tensor) -> _Shares | None:
        """Count.

        Args:
            tokens: whole numbers, of any shape.

        Returns:
            None where there are none.
        """
        if tokens.numel() == 0 or tokens.is_floating_point():
            return None
        held = views([tokens], _MOST)[0].long()
        watched = torch.stack([(held == value).sum() for value in self._values]).sum()
        ordered = held.sort().values
        run = torch.zeros_like(ordered)  # the number of the run of like tokens that each is in
        run[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
        runs = torch.zeros_like(ordered).scatter_add_(0, run, torch.ones_like(run))
        return _Shares(OnTheWay(torch.stack([watched, runs.amax()]) / held.numel()))
