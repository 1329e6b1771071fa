"""Event files as TensorBoard reads them; it checks the checksums of their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def accumulated(folder: Path) -> Any:
    """All events of a folder, none left out."""
    from tensorboard.backend.event_processing.event_accumulator import HISTOGRAMS, SCALARS, EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={HISTOGRAMS: 0, SCALARS: 0})
    events.Reload()
    return events


def contents(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Folder of a mode and worker → tag → (step, time, value) of each event, for scalars and histograms."""
    return {place.name: _values(accumulated(place)) for place in sorted(folder.iterdir())}


def _values(events: Any) -> dict[str, list[Any]]:
    tags = events.Tags()
    scalars = {
        f"scalar {tag}": [(event.step, event.wall_time, event.value) for event in events.Scalars(tag)]
        for tag in tags["scalars"]
    }
    histograms = {
        f"histogram {tag}": [
            (event.step, event.wall_time, event.histogram_value) for event in events.Histograms(tag)
        ]
        for tag in tags["histograms"]
    }
    return scalars | histograms


def event_files(folder: Path) -> list[str]:
    """Paths of the files, relative to the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("events.out.tfevents.*"))
