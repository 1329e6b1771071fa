"""What holds of every test of replays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _same_flags() -> Iterator[None]:
    """Restore the flags of PyTorch that a replay sets."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
