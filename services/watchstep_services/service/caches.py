"""Earlier rows of the runs that this process judged last, kept so that they need not be read again.

Rule configs of runs and what they remember, as this process wrote them last, lest they be asked for at every evaluation.

The database is the truth, and every claim counts up the run's epoch, as does every change of its rule configs. So
what was committed under one epoch is what the database holds as long as the next claim is given the next epoch: nobody
else has held the run since, and no rule config has changed. Anything else is a miss.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from watchstep_rules.engine.history import History
from watchstep_rules.engine.rule_inputs import Lookback
from watchstep_services.service.judging import Loaded

_ROWS = 2_000_000


class HistoryCache:
    """Histories of the runs that this process judged last. Thread-safe.

    An entry counts only for the cursor and lookback that it was made for; anything else is a miss.

    Args:
        rows: of all histories together, about 400 bytes each; beyond that those that were used least lately go.
    """

    def __init__(self, rows: int = _ROWS) -> None:
        self._most = rows
        self._rows = 0
        self._held: OrderedDict[tuple[int, str], tuple[str, Lookback, History]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: tuple[int, str], cursor: str, lookback: Lookback) -> History | None:
        """The history of a (run id, attempt) at a cursor."""
        with self._lock:
            held = self._held.get(run)
            if held is None or held[:2] != (cursor, lookback):
                return None
            self._held.move_to_end(run)
            return held[2]

    def put(self, run: tuple[int, str], cursor: str, lookback: Lookback, history: History) -> None:
        """Keep a history."""
        with self._lock:
            before = self._held.pop(run, None)
            self._rows += _size(history) - (_size(before[2]) if before else 0)
            self._held[run] = (cursor, lookback, history)
            while self._rows > self._most and len(self._held) > 1:
                _, (_, _, gone) = self._held.popitem(last=False)
                self._rows -= _size(gone)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held.clear()
            self._rows = 0


def _size(history: History) -> int:
    return max(1, len(history.block))


_RUNS = 4096


class RememberedCache:
    """What the rule configs remember of the runs that this process judged last. Thread-safe.

    Args:
        runs: so many attempts, about 20 KB each; beyond that those that were used least lately go.
    """

    def __init__(self, runs: int = _RUNS) -> None:
        self._most = runs
        self._held: OrderedDict[tuple[int, str], tuple[int, Sequence[Loaded]]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: tuple[int, str], epoch: int) -> Sequence[Loaded] | None:
        """What the database holds of a (run id, attempt) that was claimed with an epoch; None where it must be asked."""
        with self._lock:
            held = self._held.get(run)
            if held is None or held[0] + 1 != epoch:
                return None
            self._held.move_to_end(run)
            return held[1]

    def put(self, run: tuple[int, str], epoch: int, committed: Sequence[Loaded]) -> None:
        """Keep what was committed under an epoch."""
        with self._lock:
            self._held[run] = (epoch, committed)
            self._held.move_to_end(run)
            while len(self._held) > self._most:
                self._held.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held.clear()
