"""The pictures of the web page in the documentation: ``make test-web`` photographs the pages, ``python -m docs.images.draw_web_page`` crops them."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from tests.web.site import SCREENSHOTS

PICTURES = Path(__file__).with_name("web")
NAMES = (
    "run-light",
    "run-dark",
    "alert-light",
    "tensor-light",
    "compare-light",
    "rules-backtest-light",
    "trace-dark",
)
_COLOURS = 128
_HEIGHT = 1240


def main() -> None:
    """Crop and compress the screenshots."""
    PICTURES.mkdir(exist_ok=True)
    for name in NAMES:
        with Image.open(SCREENSHOTS / f"{name}.png") as image:
            top = image.convert("RGB").crop((0, 0, image.width, min(image.height, _HEIGHT)))
            top.quantize(_COLOURS).save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
