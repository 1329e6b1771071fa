"""How many processes load data for this one."""

from __future__ import annotations

import os
from pathlib import Path

from watchstep.system_figures import DATA_WORKERS

_NAME = "pt_data_worker"
"""What PyTorch 2.6 and later call a worker of a `DataLoader`."""
_EVERY = 10  # samples: workers come and go by epochs


class DataWorkers:
    """Children of this process, and of a fork server's, by their name (``/proc/PID/comm``)."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._processes = root / "proc"
        self._samples = 0

    def sample(self, seconds: float) -> dict[str, float]:  # noqa: ARG002 - a source's; nothing here is a rate
        """How many, each tenth time; nothing where there are none, or they are not to be told from others."""
        self._samples += 1
        if self._samples % _EVERY != 1:
            return {}
        children = self._children(os.getpid())
        below = [grandchild for child in children for grandchild in self._children(child)]
        count = sum(self._is_worker(child) for child in (*children, *below))
        return {DATA_WORKERS: float(count)} if count else {}

    def close(self) -> None:
        """Nothing is held."""

    def _children(self, pid: int) -> list[int]:
        """Of its first thread, which is where programs load data."""
        try:
            text = (self._processes / f"{pid}/task/{pid}/children").read_text(encoding="ascii")
        except OSError:  # it has ended, or the kernel does not tell
            return []
        return [int(child) for child in text.split()]

    def _is_worker(self, pid: int) -> bool:
        try:
            return (self._processes / f"{pid}/comm").read_text(
                encoding="utf-8", errors="replace"
            ).strip() == _NAME
        except OSError:  # it has ended
            return False
