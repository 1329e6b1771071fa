"""How fast the web page opens and moves, beside TensorBoard.

``python -m benchmarks.dashboard [--quick] [--json FILE]``. Needs Chromium from the system. Everything is measured in it, through Playwright, with the
service in its own process on the same machine.

- *Opens*: time from the start of the navigation to the page of a run of 10,000 steps x 500 tensors until its losses and its heatmap are drawn. ``first``
  is the first visit of a service that has just started, whose caches are empty; ``again`` a later visit, whose answers are in the service's cache. The
  login and the page's files are loaded before, as at any visit but the first one.
- *Frames*: while the timeline of a trace with 100,000 operations is dragged and zoomed, the 95th percentile of the time between animation frames, and of
  the page's work in one. Chromium draws at 60 Hz, so that an interval is at least 16.7 ms; a longer one is a frame that was missed.

The peer is TensorBoard with the losses and one figure of 50 of the tensors (all 500 were not tried): time until the first
of its charts is drawn, after it has loaded the events.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.dashboard_run import PROJECT, RUN, STEPS, make_run
from benchmarks.report import Figure, Report, arguments
from watchstep.format.layout import TraceKey, run_prefix
from watchstep.store.store import Store
from watchstep.trace.operations import Operation, Phase, Trace, TracedTensor
from watchstep.trace.trace_file import encode_trace
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

OPERATIONS = 100_000
ATTEMPT = "a1"
_OPEN_TARGET, _FRAME_TARGET, _WORK_TARGET = 1.0, 16.7, 16.0
_PEER_TENSORS = 50
_ARGUMENTS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)

_WORK = """
  window.__work = [];
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (callback) =>
    request((now) => {
      const began = performance.now();
      callback(now);
      window.__work.push(performance.now() - began);
    });
"""
_FRAMES = """
() => new Promise((resolve) => {
  const times = [];
  let last = performance.now();
  const frame = (now) => {
    times.push(now - last);
    last = now;
    if (window.__measuring) requestAnimationFrame(frame);
    else resolve(times.slice(1));
  };
  window.__measuring = true;
  requestAnimationFrame(frame);
})
"""


def chromium() -> str:
    """Return the path of Chromium.

    Raises:
        SystemExit: there is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise SystemExit("no Chromium: apt-get install chromium")


def made_trace(operations: int) -> Trace:
    """Return a trace of a chain of operations in ten steps; some outputs of the last step are not finite."""
    made = []
    each = operations // 10
    for number in range(operations):
        step, place = divmod(number, each)
        bad = step == 9 and place > each // 2
        inputs = (TracedTensor(place, (64, 64), "float32", nonfinite=bad),) if place else ()
        outputs = (TracedTensor(place + 1, (64, 64), "float32", nonfinite=bad),)
        phase: Phase = "forward" if place < each // 2 else "backward"
        name, module = f"aten.op{place % 40}", f"blocks.{place % 24}.mlp"
        made.append(Operation(number, step, name, phase, module, inputs, outputs))
    return Trace(tuple(made))


def opened_seconds(page: Page, address: str) -> float:
    """Return the time until a run's page shows its losses and its heatmap."""
    began = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.get_by_role("application", name="by layer and step").wait_for()
    page.locator(".u-over").first.wait_for()  # uPlot's
    page.locator("html:not([data-loading])").wait_for()
    return time.perf_counter() - began


@contextmanager
def service(store: Path) -> Iterator[EmbeddedService]:
    """A service that has just started, so that its caches are empty."""
    settings = load_settings(store=str(store), home=store / ".watchstep", port=0)
    with EmbeddedService(settings) as running:
        yield running


def logged_in(browser: Browser, running: EmbeddedService, script: str = "") -> Page:
    """Return a page that is logged in and has loaded the page's files; ``script`` runs before the page's own."""
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    if script:
        context.add_init_script(script)
    page = context.new_page()
    page.goto(running.page_link)
    page.get_by_role("heading", level=1).wait_for()
    return page


def run_address(running: EmbeddedService) -> str:
    """Return the address of the run's page."""
    return f"{running.url}/projects/{PROJECT}/runs/{RUN}"


def measure_open(report: Report, browser: Browser, store: Path, rounds: int) -> None:
    """Add how fast the run's page opens."""
    first: list[float] = []
    again: list[float] = []
    for _ in range(rounds):
        with service(store) as running:
            page = logged_in(browser, running)
            first.append(opened_seconds(page, run_address(running)))
            again.extend(opened_seconds(page, run_address(running)) for _ in range(3))
            page.context.close()
    for name, values in (("run page opens, first", first), ("run page opens, again", again)):
        note = f"{len(values)} visits, {min(values):.2f} to {max(values):.2f}"
        report.add(name, Figure(statistics.median(values), "s", _OPEN_TARGET, note=note))


def measure_frames(report: Report, browser: Browser, store: Path) -> None:
    """Add the frames of the timeline while it is dragged and zoomed."""
    with service(store) as running:
        page = logged_in(browser, running, _WORK)
        page.goto(f"{run_address(running)}/traces/{ATTEMPT}/0/0/9")
        timeline = page.get_by_role("application", name="Timeline")
        timeline.wait_for(timeout=60_000)
        page.locator("html:not([data-loading])").wait_for()
        box = timeline.bounding_box()
        assert box is not None
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(*middle)
        page.evaluate(f"void (window.__frames = ({_FRAMES})())")  # not awaited: it ends after the drags
        page.keyboard.down("Control")
        for _ in range(20):
            page.mouse.wheel(0, -120)
        page.keyboard.up("Control")
        for turn in range(3):
            page.mouse.move(*middle)
            page.mouse.down()
            for step in range(60):
                page.mouse.move(middle[0] + (step if turn % 2 else -step) * 4, middle[1])
            page.mouse.up()
        page.keyboard.down("Control")
        for _ in range(20):
            page.mouse.wheel(0, 120)
        page.keyboard.up("Control")
        page.evaluate("window.__measuring = false")
        frames = np.array(page.evaluate("window.__frames"))
        work = np.array(page.evaluate("window.__work"))
        page.context.close()
    interval = round(float(np.percentile(frames, 95)), 1)  # browsers round times to 0.1 ms
    note = f"{len(frames)} frames, median {np.median(frames):.1f}, longest {frames.max():.0f} ms"
    name = f"timeline of {OPERATIONS:,} operations"
    report.add(f"{name}, p95 interval", Figure(interval, "ms", _FRAME_TARGET, note=note))
    note = f"{len(work)} callbacks, longest {work.max():.1f} ms"
    report.add(f"{name}, p95 work", Figure(float(np.percentile(work, 95)), "ms", _WORK_TARGET, note=note))


def measure_peer(report: Report, browser: Browser, folder: Path, steps: int) -> None:
    """Add how long TensorBoard takes to open a part of the same run."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(steps):
            writer.add_scalar("loss", 1.0 / (1 + step), step)
            for tensor in range(_PEER_TENSORS):
                writer.add_scalar(f"l2/{tensor}", float(step % (tensor + 2)), step)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}/data/plugin/timeseries/tags"
            wanted = f"l2/{_PEER_TENSORS - 1}"
            while time.perf_counter() - began < 300:
                try:
                    if wanted in urllib.request.urlopen(address).read().decode():
                        break
                except OSError:
                    pass
                time.sleep(0.2)
            loaded = time.perf_counter() - began
            page = browser.new_context(viewport={"width": 1600, "height": 1000}).new_page()
            times = []
            for _ in range(3):
                began = time.perf_counter()
                page.goto(f"http://127.0.0.1:{port}/#timeseries", wait_until="commit")
                page.locator("line-chart").first.wait_for(timeout=60_000)
                times.append(time.perf_counter() - began)
                page.goto("about:blank")
            page.context.close()
        finally:
            process.terminate()
    note = f"{_PEER_TENSORS + 1} of the series; {min(times):.2f} to {max(times):.2f}; loaded its events for {loaded:.0f} s before"
    report.add("peer: TensorBoard opens", Figure(statistics.median(times), "s", note=note))


def main() -> None:
    """Measure and report."""
    chosen = arguments("How fast the web page opens and moves, beside TensorBoard.").parse_args()
    steps = 300 if chosen.quick else STEPS
    report = Report(f"Web page: {steps:,} steps x 500 tensors", chosen.quick, ("playwright", "tensorboard"))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        store = Path(folder) / "runs"
        make_run(store, steps)
        root = Store.open(str(store)).child(run_prefix(PROJECT, RUN))
        root.put(
            TraceKey(ATTEMPT, 0, 0, 9).path,
            encode_trace(made_trace(OPERATIONS // (10 if chosen.quick else 1))),
        )
        browser = playwright.chromium.launch(executable_path=chromium(), args=[*_ARGUMENTS])
        report.remark(f"Chromium {browser.version}, headless; wall times of a shared machine")
        measure_open(report, browser, store, 1 if chosen.quick else 5)
        measure_frames(report, browser, store)
        measure_peer(report, browser, Path(folder) / "events", steps)
        browser.close()
    report.finish(chosen.json)


if __name__ == "__main__":
    main()
