"""The pictures of the guide about pictures: ``python -m docs.images.draw_plots`` runs its examples and keeps what they draw.

The picture of the report needs Playwright and Chromium; the variable CHROMIUM names another executable than Playwright's own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

GUIDE = Path(__file__).parents[1] / "guides" / "plots.md"
PICTURES = Path(__file__).with_name("plots")
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COLOURS = 160
_PAGE = {"width": 1000, "height": 1250}
_NAMES = {"run.png": "run", "tensor.png": "tensor", "ridges.png": "ridges", "exploding_gradient.png": "alert"}


def main() -> None:
    """Draw the pictures anew."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        program = "\n".join(_BLOCK.findall(GUIDE.read_text(encoding="utf-8")))
        subprocess.run([sys.executable, "-c", program], cwd=place, check=True)  # noqa: S603 - the examples of the guide
        _photograph(place / "report.html", place / "page.png")
        for source, name in {**_NAMES, "page.png": "report"}.items():
            with Image.open(place / source) as image:
                small = image.convert("RGB").quantize(_COLOURS)
                small.save(PICTURES / f"{name}.png", optimize=True)
        shutil.copy(place / "tensor.gif", PICTURES / "tensor.gif")


def _photograph(page_file: Path, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": _PAGE["width"], "height": _PAGE["height"]})
        page.goto(page_file.as_uri())
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main()
