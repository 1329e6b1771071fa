"""An event file for TensorBoard, in the folder ``watchstep`` below the folder of the program's own event files.

TensorBoard reads the files of a folder one after the other, and does not return to an earlier one: a file of the mirror in the program's own folder would hide
what the program writes later. In a folder below, TensorBoard shows it as the run ``watchstep`` of the same name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from watchstep.capture.mirror.mirrored_run import PREFIX, AlertChange, MirroredPoint, OtherRun, RunLinks
from watchstep.format.event_files.tensorboard import EventFile, encode_scalars, encode_text
from watchstep.platform.folders import absolute_path


class TensorBoardRun:
    """The event file of the mirror."""

    def __init__(self, folder: str) -> None:
        """Create the event file.

        Args:
            folder: folder of the program's event files; created if missing.

        Raises:
            OSError: the file cannot be created.
        """
        self._folder = Path(absolute_path(folder)) / PREFIX
        self._file = EventFile(self._folder, PREFIX)

    @property
    def identity(self) -> OtherRun:
        """The folder."""
        return OtherRun(PREFIX, place=str(self._folder))

    @property
    def is_over(self) -> bool:
        """False: the file is the mirror's own."""
        return False

    def link(self, links: RunLinks) -> None:
        """Write the links as a text."""
        lines = [
            f"**{name}**: [{value}]({value})" if name == "page" else f"**{name}**: {value}"
            for name, value in links.as_data().items()
        ]
        self._file.append(encode_text(0, time.time(), f"{PREFIX}/run", "  \n".join(lines)))

    def alert(self, change: AlertChange) -> None:
        """Write the change as a text."""
        text = f"{change.severity} {change.name}: {change.text}"
        self._file.append(encode_text(change.step, time.time(), f"{PREFIX}/alerts", text))

    def write(self, points: Sequence[MirroredPoint]) -> int:
        """Write all points."""
        self._file.append(
            b"".join(encode_scalars(point.step, point.time_ns / 1e9, point.values) for point in points)
        )
        return 0

    def close(self, *, is_stopped: bool) -> int:  # noqa: ARG002 - of the protocol
        """Close the file."""
        self._file.close()
        return 0
