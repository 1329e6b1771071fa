from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from tests.sdk.reading.stored import LOSS, new_run, write
from watchstep import Run, open_run
from watchstep.client.documents import Alert
from watchstep.errors import ConfigError, NotFoundError
from watchstep.plots.tensor_plot import ridge_figure
from watchstep.reading.pictures import alert_evidence

FIRST, SECOND = gradient("first", order=1), gradient("second", order=2)
RATE = tensor("optimizer:learning_rate/0", "metrics", role="metric", shape=())
STEPS = 60
FIRED = 40


def rows() -> list[Row]:
    """A loss and two gradients, of which the second explodes at step 40 and is NaN from step 50 on."""
    generator = np.random.default_rng(0)
    found = [Row(0, RATE, [0.1])]
    for step in range(STEPS):
        size = 1e4 if step >= FIRED else 1.0
        values = generator.normal(0, 1, 16)
        found.append(Row(step, LOSS, [size / (1 + step)]))
        found.append(Row(step, FIRST, values.tolist()))
        found.append(Row(step, SECOND, [np.nan] * 16 if step >= 50 else (size * values).tolist()))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("store")
    write(new_run(folder), [block_of(rows())])
    return open_run(folder / "default" / "r")


def test_a_run_is_drawn(run: Run, tmp_path: Path) -> None:
    figure = run.plot()
    losses, layers, rates = figure.axes[:3]
    assert [line.get_label() for line in losses.lines][:1] == ["loss"]
    assert losses.get_yscale() == "log"
    assert [text.get_text() for text in layers.get_yticklabels()] == ["first.weight", "second.weight"]
    assert "red: NaN" in layers.get_title(loc="left")
    assert np.asarray(rates.lines[0].get_xydata()).tolist() == [[0.0, 0.1], [STEPS - 1, 0.1]]
    assert figure.save(tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in figure.save(tmp_path / "run.SVG").read_bytes()
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_tensor_is_drawn(run: Run, tmp_path: Path) -> None:
    found = run.tensor(SECOND.name)
    figure = found.plot("l2")
    (line, crosses) = figure.axes[0].lines
    steps = np.asarray(line.get_xdata())
    assert (line.get_label(), len(steps)) == ("l2", STEPS)
    assert np.asarray(crosses.get_xdata()).tolist() == list(range(50, STEPS))
    assert found.plot_ridges().save(tmp_path / "ridges.png").stat().st_size > 1000


def test_a_distribution_is_animated(run: Run, tmp_path: Path) -> None:
    from PIL import Image

    animation = run.tensor(FIRST.name).animate(frames=6, frame_ms=50)
    with Image.open(animation.save(tmp_path / "first.gif")) as image:
        assert image.n_frames == 6
        assert image.info["duration"] == 50
        image.seek(5)
        assert image.info["duration"] == 1500
    html = animation._repr_html_()
    assert html.startswith("<img")
    assert "data:image/gif;base64," in html


def test_a_distribution_without_finite_elements_is_drawn(tmp_path: Path) -> None:
    write(new_run(tmp_path), [block_of([Row(step, FIRST, [np.nan, 0.0]) for step in range(3)])])
    empty = open_run(tmp_path / "default" / "r")
    figure = empty.tensor(FIRST.name).plot()
    assert figure._repr_png_()
    assert ridge_figure("first", empty.histogram(FIRST.name))._repr_png_()
    assert empty.tensor(FIRST.name).animate().encode().startswith(b"GIF89a")
    assert empty.plot()._repr_png_()


def test_faults_of_arguments_are_named(run: Run, tmp_path: Path) -> None:
    figure = run.plot()
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        figure.save(tmp_path / "run.jpg")
    with pytest.raises(ConfigError, match="folder that exists"):
        figure.save(tmp_path / "none" / "run.png")
    with pytest.raises(ConfigError, match=r"ends in \.gif"):
        run.tensor(FIRST.name).animate().save("first.png")
    with pytest.raises(ConfigError, match="invalid width"):
        run.plot(width=10)
    with pytest.raises(ConfigError, match="invalid frames"):
        run.tensor(FIRST.name).animate(frames=0)
    with pytest.raises(ConfigError, match="invalid frame_ms"):
        run.tensor(FIRST.name).animate(frame_ms=1)
    with pytest.raises(ConfigError, match="no_such_figure"):
        run.tensor(FIRST.name).plot("no_such_figure")
    with pytest.raises(NotFoundError, match="no row of mode eval"):
        run.tensor(FIRST.name).plot(mode="eval")


def finding_of(run: Run, figure: str, *, step: int = FIRED, value: float | None = None) -> dict[str, object]:
    table = run.series(SECOND.name, figure)
    measured = table[figure].to_pylist()[step] if value is None else value
    return {
        "step": step, "tensor": SECOND.name, "mode": "train", "worker": 0, "role": "gradient",
        "value": measured, "threshold": 100.0, "message": "too large",
    }  # fmt: skip


@pytest.mark.parametrize("figure", ["l2", "abs_max", "std", "l1"])
def test_the_judged_figure_is_found_by_its_value(run: Run, figure: str) -> None:
    evidence = alert_evidence(run.index, "exploding", finding_of(run, figure))
    assert (evidence.figure, evidence.thresholds) == (figure, 100.0)
    assert evidence.steps == list(range(STEPS))


def test_a_quantity_of_the_rules_own_has_no_threshold(run: Run) -> None:
    evidence = alert_evidence(run.index, "ratio", finding_of(run, "l2", value=0.123))
    assert (evidence.figure, evidence.thresholds) == ("rms", None)
    missing = {**finding_of(run, "l2"), "tensor": "no such tensor"}
    assert alert_evidence(run.index, "ratio", missing).steps == ()
    with pytest.raises(ConfigError, match="no step or tensor"):
        run.plot_alert("ratio", {})


def alert(finding: dict[str, object] | None) -> Alert:
    explanation = {
        "where": "<b>second</b>",
        "against": "5, threshold 1",
        "usual_causes": ["<i>rate</i>"],
        "what_to_try": [],
    }
    details = {"message": "grows", "explanation": explanation}
    return Alert(
        "r",
        "exploding",
        "exploding_gradient",
        "a",
        "critical",
        "firing",
        40,
        0,
        0,
        None,
        finding,
        details,
        {},
    )


def test_an_alert_is_drawn_and_shown_in_a_notebook(run: Run) -> None:
    found = alert(finding_of(run, "l2"))
    figure = found.plot(run)
    assert "exploding at step 40" in figure.get_suptitle()
    html = found._repr_html_()
    assert "&lt;b&gt;second&lt;/b&gt;" in html
    assert "&lt;i&gt;rate" in html
    assert "<b>" not in html
    with pytest.raises(ConfigError, match="no step or tensor"):
        alert(None).plot(run)


def test_a_run_and_a_tensor_are_shown_in_a_notebook(run: Run) -> None:
    html = run._repr_html_() + run.tensor(SECOND.name)._repr_html_()
    assert "the last step is 59" in html
    assert "second.weight:gradient" in html
    assert html.count('class="ws-c0 ws-line"') == 2
    assert "<script" not in html
