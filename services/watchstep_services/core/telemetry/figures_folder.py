"""The folder in which the processes of one service keep their metrics, so that they can be summed.

Separate from `exposition`, because the folder must be named before prometheus_client is imported: the library decides then, once.
"""

from __future__ import annotations

import os
import shutil
import tempfile

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def share_figures() -> None:
    """Have this process and those that it starts keep their figures together, in a new folder."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="watchstep-figures-")


def forget_folder() -> None:
    """Remove the folder; at the end of the process that made it."""
    if folder := os.environ.pop(FOLDER, ""):
        shutil.rmtree(folder, ignore_errors=True)
