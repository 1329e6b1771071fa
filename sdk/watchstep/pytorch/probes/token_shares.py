"""What share of the tokens that an embedding is given are padding, or one and the same.

    token_share = tokens that are one of the watched values / tokens
    top_token_share = occurrences of the most frequent token / tokens

Of longer inputs at most 4,096 tokens are looked at, evenly spaced: a share of them has a standard error below one percent. Tokens
that the probe ``token_count:TOKEN`` asks for are counted among all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from watchstep.capture.config import TOKEN_COUNT, TOKENS, of_kind
from watchstep.format.statistics import Floats
from watchstep.pytorch.probes.staging import OnTheWay, views, wide_float

_MOST = 4096


@dataclass(frozen=True)
class _Shares:
    """One row."""

    columns: tuple[str, ...]
    figures: OnTheWay
    tokens: int

    def collect(self) -> dict[str, Floats]:
        values = self.figures.numbers()
        found = {name: value.reshape(1) for name, value in zip(self.columns, values, strict=True)}
        return {**found, TOKENS: np.array([float(self.tokens)])} if TOKEN_COUNT in self._kinds else found

    @property
    def _kinds(self) -> set[str]:
        return {name.partition(":")[0] for name in self.columns}


class TokenProbe:
    """Looks at what one embedding is given.

    Attributes:
        applies: whether the module is one.
    """

    def __init__(self, module: nn.Module, values: tuple[int, ...], probes: Sequence[str]) -> None:
        """Watch a module.

        Args:
            module: an embedding, or any other.
            values: the watched tokens; the module's ``padding_idx`` where there are none, or 0 where it has none.
            probes: as configured.
        """
        self._shares = "token_shares" in probes
        self._counted = {probe.name: int(probe.arguments[0]) for probe in of_kind(probes, TOKEN_COUNT)}
        self.applies = isinstance(module, nn.Embedding) and (self._shares or bool(self._counted))
        padding = module.padding_idx if isinstance(module, nn.Embedding) else None
        self._values = values or (padding if isinstance(padding, int) else 0,)

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
        names, figures = list(self._counted), [(tokens == value).sum() for value in self._counted.values()]
        if self._shares:
            names += ["token_share", "top_token_share"]
            figures += self._shares_of(tokens)
        return _Shares(
            tuple(names),
            OnTheWay(torch.stack([figure.to(wide_float(tokens.device)) for figure in figures])),
            tokens.numel(),
        )

    def _shares_of(self, tokens: Tensor) -> list[Tensor]:
        held = views([tokens], _MOST)[0].long()
        watched = torch.stack([(held == value).sum() for value in self._values]).sum()
        ordered = held.sort().values
        run = torch.zeros_like(ordered)  # the number of the run of like tokens that each is in
        run[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
        runs = torch.zeros_like(ordered).scatter_add_(0, run, torch.ones_like(run))
        return [watched / held.numel(), runs.amax() / held.numel()]
