"""Export of a run as TensorBoard event files: figures as scalars, exponent histograms as histograms."""

from __future__ import annotations

import os
from pathlib import Path

from watchstep.errors import ConfigError
from watchstep.format.event_files.tensorboard import FIGURES, EventFile, encode_rows
from watchstep.reading.run import Run


def export(run: Run, folder: str | os.PathLike[str], figures: tuple[str, ...] = FIGURES) -> int:
    """Write a run as event files, one folder for each mode and worker.

    `watchstep.format.event_files.tensorboard` describes their scalars and histograms. ``Hook(tensorboard=…)`` writes the same during a run.

    Args:
        run: the run.
        folder: the target folder; created if missing.
        figures: figures of each tensor.

    Returns:
        Number of written scalars and histograms.

    Raises:
        ConfigError: the folder contains event files already, or is not writable, or a figure does not exist.
        StoreError: the run cannot be read.
    """
    target = Path(folder)
    if any(target.rglob("events.out.tfevents.*")):
        raise ConfigError(
            f"folder {target} contains event files already", "use a new folder, to avoid duplicate steps"
        )
    files: dict[str, EventFile] = {}
    written = 0
    try:
        for name in [info.name for info in run.catalogue]:
            for events in encode_rows(run.tensor(name).rows, figures):
                if not events.data:
                    continue
                if events.folder not in files:
                    files[events.folder] = EventFile(target / events.folder, "export")
                files[events.folder].append(events.data)
                written += events.values
    except OSError as error:
        raise ConfigError(
            f"folder {target}: {error.strerror or error}", "use a folder that you may write to"
        ) from error
    finally:
        for file in files.values():
            file.close()
    return written
