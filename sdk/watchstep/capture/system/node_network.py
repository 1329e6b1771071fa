"""What goes over the machine's network."""

from __future__ import annotations

from pathlib import Path

from watchstep.capture.system.source import Counters, content
from watchstep.system_figures import NODE_NETWORK_RECEIVED, NODE_NETWORK_SENT


class NodeNetwork:
    """All interfaces but the loopback, of this process's network namespace (``/proc/self/net/dev``, proc(5)).

    What InfiniBand carries past the kernel, as NCCL does, is not in it.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = str(root / "proc/self/net/dev")
        self._counters = Counters()

    def sample(self, seconds: float) -> dict[str, float]:
        """Bytes a second."""
        received = sent = 0
        for line in content(self._stat).splitlines()[2:]:
            name, _, numbers = line.partition(b":")
            if name.strip() != b"lo":
                words = numbers.split()
                received, sent = received + int(words[0]), sent + int(words[8])
        totals = {NODE_NETWORK_RECEIVED: received, NODE_NETWORK_SENT: sent}
        return {name: added / seconds for name, added in self._counters.added(totals).items()}

    def close(self) -> None:
        """Nothing is held."""
