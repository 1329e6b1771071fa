from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.sdk.training import Training
from watchstep import CaptureConfig, Hook, open_run
from watchstep_services.demo.report import Display, Evidence, draw_png, draw_text
from watchstep_services.demo.trainings import WatchedRun

LONG = (
    "non_finite_values: 18432 NaN among 18432 elements of features.0.block.conv1:output, 0 tolerated, in "
    + 60 * "W"
)


@pytest.mark.parametrize("title", ["non_finite_values: short", LONG, f"{LONG} $\\alpha$ \x1b[31m"])
def test_the_title_of_the_picture_is_not_cut_off(tmp_path: Path, title: str) -> None:
    import matplotlib.image

    hook, training = Hook(tmp_path, run="r", config=CaptureConfig(overhead_budget=None)), Training()
    hook.watch(training.model, training.optimizer)
    training.run(4)
    hook.close()
    run = open_run(hook.run_url)
    draw_png(Evidence(run, run, 2, 3, title), tmp_path / "picture.png")
    picture = matplotlib.image.imread(tmp_path / "picture.png")
    height, width = picture.shape[:2]
    above_the_plots = picture[: height // 5, :, :3]
    edges = np.concatenate([above_the_plots[:, :5], above_the_plots[:, width - 5 :]], axis=1)
    assert (edges == 1.0).all()
    assert (above_the_plots < 0.5).any()


def colours_of(ansi: str, text: str) -> set[str]:
    """The colours of the places where a text stands in a terminal's output."""
    shown = Text.from_ansi(ansi)
    return {
        span.style.color.name
        for place in re.finditer(text, shown.plain)
        for span in shown.spans
        if span.start <= place.start() < span.end
        and isinstance(span.style, Style)
        and span.style.color is not None
    }


def test_the_plot_has_the_colours_of_the_table(tmp_path: Path) -> None:
    runs = []
    for name in ("healthy", "faulty"):
        with Hook(tmp_path, run=name) as hook:
            for step in range(40 if name == "healthy" else 20):
                hook.log(loss=1 / (1 + step))
                hook.step()
        runs.append(open_run(hook.run_url))
    plot = draw_text(Evidence(runs[0], runs[1], 10, 19, "title"), 80, colours=True)
    console = Console(force_terminal=True, width=120, file=io.StringIO(), color_system="standard")
    alert = {"rule": "nan_or_inf"}
    table = Display(
        console, [WatchedRun("healthy", "p", "a"), WatchedRun("faulty", "p", "b", alerts=[alert])]
    )
    with console.capture() as captured:
        console.print(table._table())
    colours = set()
    for label, shown in (("healthy", "none"), ("faulty", "nan_or_inf")):
        (colour,) = colours_of(captured.get(), shown)
        assert colours_of(plot, f"\\S(?= {label})") == {colour}
        colours.add(colour)
    assert colours_of(plot, "[▀-▟]") == colours
    assert len(colours) == 2
