"""Cells of notebooks that the docs show run in a real kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_docs import PAGES, blocks
from tests.launch.beside import end_service_of
from tests.notebook import Notebook

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "ipython")], ids=lambda page: page.name
)
def test_cells_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    said = {"WATCHSTEP_JOBS": str(tmp_path / "jobs"), "CI": "", "WATCHSTEP_QUIET": ""}
    with Notebook(tmp_path, said).running() as notebook:
        notebook.text(blocks(page, "python")[0])
        for cell in blocks(page, "ipython"):
            outputs = notebook.run(cell)
            assert not [each for each in outputs if each.output_type == "error"], outputs
            assert not [each for each in outputs if each.output_type == "stream" and each.name == "stderr"], (
                outputs
            )
    end_service_of(tmp_path / "watchstep-runs")
