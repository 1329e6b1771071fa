"""The pictures of the web page in the documentation: ``python -m docs.images.draw_web_page`` runs the demo and photographs its page.

Needs Chromium from the system.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.web.site import CHROMIUM, CHROMIUM_ARGUMENTS, PROJECT, Visit, record_demo, settled
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

PICTURES = Path(__file__).with_name("web")
_COLOURS = 128


def main() -> None:
    """Draw the pictures anew."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        store = Path(folder) / "runs"
        settings = load_settings(store=str(store), home=store / ".watchstep", port=0, sweep_seconds=0.5)
        with EmbeddedService(settings) as service:
            _, faulty = record_demo(service, Path(folder))
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*CHROMIUM_ARGUMENTS])
            visit = Visit(browser, service.url, service.page_link.partition("#token=")[2])
            for name, dark in (("run-light", False), ("run-dark", True)):
                with visit.open(f"/projects/{PROJECT}/runs/{faulty}", dark=dark, height=1240) as page:
                    settled(page)
                    page.wait_for_timeout(500)  # the canvases draw after the answers
                    page.screenshot(path=Path(folder) / "page.png")
                with Image.open(Path(folder) / "page.png") as image:
                    image.convert("RGB").quantize(_COLOURS).save(PICTURES / f"{name}.png", optimize=True)
            browser.close()


if __name__ == "__main__":
    main()
