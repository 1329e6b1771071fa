"""The page of an operation trace: the first bad operation, the timeline, the graph, tensors, source, stack and alerts, all linked."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.site import (
    PROJECT,
    Site,
    Visit,
    check_themes,
    query,
    screenshot,
    serious_findings,
    settled,
    shown,
)
from tests.web.traced_runs import (
    LARGE_BAD_STEP,
    LARGE_STEPS,
    RUN,
    hostile_trace,
    large_trace,
    put_trace,
    record_traced_run,
)
from watchstep.format.layout import TraceKey
from watchstep.trace import Trace

EMPTY, LARGE, HOSTILE = TraceKey("", 7, 0, 0), TraceKey("", 8, 0, LARGE_STEPS - 1), TraceKey("", 9, 0, 0)
"""Traces that are put beside the recorded ones; their attempt is that of the run."""


@pytest.fixture(scope="module")
def traces(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of the pages of traces: `healthy` and `faulty` are recorded, the others made."""
    healthy, faulty = record_traced_run(site.store, tmp_path_factory.mktemp("traced"))
    made: dict[TraceKey, Trace] = {
        EMPTY: Trace(()),
        LARGE: large_trace(),
        HOSTILE: hostile_trace(),
    }
    keys = {"healthy": healthy, "faulty": faulty}
    for name, (key, trace) in zip(("empty", "large", "hostile"), made.items(), strict=True):
        keys[name] = put_trace(site.store, TraceKey(healthy.attempt, key.worker, key.first, key.last), trace)
    wait_until_registered(site)
    return {
        name: f"{site.run_path(RUN)}/traces/{key.attempt}/{key.worker}/{key.first}/{key.last}"
        for name, key in keys.items()
    }


def wait_until_registered(site: Site) -> None:
    """Register the run, as its recorder would with a service's address. Idempotent."""
    headers = {"authorization": f"Bearer {site.service.operator_token}"}
    response = httpx.post(
        f"{site.url}/v1/projects/{PROJECT}/runs", headers=headers, json={"run": RUN}, timeout=30
    )
    assert response.is_success, response.text


def timeline(page: Page) -> Locator:
    return page.get_by_role("application", name=re.compile("Timeline of"))


def pixels(canvas: Locator) -> str:
    """Return a picture's content, to tell whether it has changed. Waits for the frame that draws it."""
    drawn = """canvas => new Promise(resolve => requestAnimationFrame(() =>
        requestAnimationFrame(() => resolve(canvas.toDataURL()))))"""
    return str(canvas.evaluate(drawn))


def test_the_first_bad_operation_with_its_line(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(traces["faulty"]) as page:
        shown(page)
        verdict = page.locator("section", has=page.locator("#verdict"))
        expect(page.locator("#verdict")).to_have_text(
            re.compile(
                r"aten\.log\.default made \d+ .inf of 48 from finite inputs, in step 5, forward pass of head\."
            )
        )
        expect(verdict).to_contain_text("return torch.log(probabilities)")
        expect(verdict).to_contain_text(re.compile(r"train\.py:\d+ in forward"))
        expect(verdict).to_contain_text(re.compile(r"It reached loss\. Its input 0 has \d+ zeros of 48"))
        # It is selected: all panes show it.
        expect(page.get_by_role("heading", level=2, name="aten.log.default", exact=True)).to_be_visible()
        tensors = page.get_by_role("table")
        expect(tensors.get_by_role("row", name=re.compile("input 0"))).to_contain_text("finite")
        expect(tensors.get_by_role("row", name=re.compile("output 0"))).to_contain_text(
            re.compile(r"\d+ .inf of 48")
        )
        source = page.get_by_role("region", name="Source text")
        expect(source.locator("[aria-current]")).to_contain_text("return torch.log(probabilities)")
        stack = page.get_by_role("list", name="Stack, innermost line first").get_by_role("button")
        expect(stack.first).to_contain_text("forward")
        expect(stack.last).to_contain_text("<module>")
        alerts = page.locator("section", has=page.locator("#alerts"))
        expect(alerts.locator("[aria-current]")).to_contain_text("aten.log.default")
        check_themes(page, "trace")


def test_a_healthy_trace_says_so(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(traces["healthy"]) as page:
        shown(page)
        expect(page.locator("#verdict")).to_have_text("All values were finite.")
        expect(page.get_by_role("main")).to_contain_text("No output was recorded as not finite.")
        page.get_by_label("Trace of the run").select_option(traces["faulty"])
        expect(page.locator("#verdict")).to_contain_text("aten.log.default")
        assert urlsplit(page.url).path == traces["faulty"]


def test_the_run_leads_to_its_traces(visit: Visit, site: Site, traces: dict[str, str]) -> None:
    with visit.open(site.run_path(RUN)) as page:
        settled(page)
        page.get_by_role("link", name=re.compile("Steps 4.5")).click()
        expect(page.locator("#verdict")).to_contain_text("aten.log.default")
        page.get_by_role("link", name=RUN, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(RUN)


def test_panes_follow_the_selection_and_the_address_holds_it(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(traces["faulty"]) as page:
        shown(page)
        alerts = page.locator("section", has=page.locator("#alerts"))
        alerts.get_by_role("button", name=re.compile(r"aten\.div\.Tensor")).click()
        heading = page.locator("#operation")
        expect(heading).to_have_text("aten.div.Tensor")
        expect(page.get_by_role("main")).to_contain_text("LogBackward0")
        chosen = query(page)["op"]
        page.get_by_role("list", name="Stack, innermost line first").get_by_role("button").last.click()
        page.wait_for_url(re.compile("frame="))
        expect(page.get_by_role("region", name="Source text").locator("[aria-current]")).to_contain_text(
            "nll_loss"
        )
        page.reload()
        shown(page)
        expect(heading).to_have_text("aten.div.Tensor")
        expect(
            page.get_by_role("list", name="Stack, innermost line first").get_by_role("button").last
        ).to_have_attribute("aria-pressed", "true")
        assert query(page)["op"] == chosen
        # A backward operation leads to the forward operation whose gradient it computes.
        page.get_by_role("link", name=re.compile(r"operation \d+")).click()
        expect(heading).to_have_text("aten.log.default")
        page.go_back()
        expect(heading).to_have_text("aten.div.Tensor")


def test_walking_along_the_graph(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(traces["faulty"]) as page:
        shown(page)
        heading = page.locator("#operation")
        page.get_by_role("list", name="Read by").get_by_role(
            "button", name=re.compile("nll_loss_forward")
        ).click()
        expect(heading).to_have_text("aten.nll_loss_forward.default")
        settled(page)
        # By keys: to the inputs, and on to the operation that wrote the first one.
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("list", name="Reads from").locator(":focus")).to_contain_text(
            "aten.log.default"
        )
        page.keyboard.press("ArrowLeft")
        expect(heading).to_have_text("aten.log.default")
        settled(page)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        expect(page.get_by_role("list", name="Read by").locator(":focus")).to_contain_text(
            "nll_loss_backward"
        )
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("group", name=re.compile("aten.log.default, operation"))).to_be_focused()
        page.go_back()
        expect(heading).to_have_text("aten.nll_loss_forward.default")


def test_search_and_filters(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(traces["faulty"]) as page:
        shown(page)
        before = pixels(timeline(page))
        page.get_by_label("Search operations").fill("SOFTMAX")
        count = page.get_by_role("search").get_by_role("status")
        expect(count).to_have_text(re.compile(r"^\d+ of 240\s+operations"))
        operations = page.locator("section", has=page.locator("#operations")).get_by_role("listitem")
        expect(operations.first).to_contain_text("oftmax")
        assert pixels(timeline(page)) != before
        page.get_by_label("Only not finite").check()
        page.get_by_label("Phase").select_option("backward")
        expect(operations).to_have_count(1)
        expect(operations.first).to_contain_text("_softmax_backward_data")
        page.get_by_role("button", name="head", exact=True).click()
        assert query(page) == {"q": "SOFTMAX", "bad": "1", "phase": "backward", "module": "head"}
        page.reload()
        shown(page)
        expect(operations).to_have_count(1)
        expect(page.get_by_role("button", name="head", exact=True)).to_have_attribute("aria-pressed", "true")
        page.get_by_label("Step", exact=True).select_option("4")
        expect(page.get_by_role("main")).to_contain_text("No operation matches the filter.")
        page.get_by_role("button", name="Clear").click()
        expect(count).to_have_text(re.compile(r"^240\s+operations"))


def test_the_module_tree(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(traces["faulty"]) as page:
        shown(page)
        modules = page.get_by_role("list", name="Modules")
        names = [row.strip() for row in modules.get_by_role("listitem").all_inner_texts()]
        assert [name.split()[-1] for name in names][:4] == ["embed", "blocks", "0", "norm"]
        page.get_by_role("button", name="Parts of blocks", exact=True).click()
        expect(modules.get_by_role("button", name="norm")).to_have_count(0)
        assert query(page) == {"tree": "blocks"}
        page.reload()
        shown(page)
        expect(modules.get_by_role("button", name="norm")).to_have_count(0)
        page.get_by_role("button", name="Parts of blocks", exact=True).click()
        expect(modules.get_by_role("button", name="norm")).to_have_count(2)


def test_the_timeline_by_keys(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(traces["faulty"]) as page:
        shown(page)
        spoken = page.get_by_role("status").filter(has_text=re.compile(r"operation \d+,"))
        canvas = timeline(page)
        canvas.focus()
        first = pixels(canvas)
        page.keyboard.press("ArrowLeft")
        expect(spoken).to_contain_text("aten.detach.default")
        page.keyboard.press("n")
        page.keyboard.press("n")
        expect(spoken).to_contain_text("aten.nll_loss_forward.default")
        expect(spoken).to_contain_text("not finite")
        page.keyboard.press("p")
        expect(spoken).to_contain_text("aten.log.default")
        expect(page.locator("#operation")).to_have_text("aten.log.default")
        page.keyboard.press("+")
        page.wait_for_url(re.compile("from="))
        assert pixels(canvas) != first
        zoom = query(page)
        assert int(zoom["to"]) - int(zoom["from"]) == 120
        page.reload()
        shown(page)
        assert query(page) == zoom
        canvas.focus()
        page.keyboard.press("End")
        page.wait_for_url(re.compile("to=240"))  # the selection stays in view
        page.keyboard.press("0")
        page.wait_for_url(lambda url: "from=" not in url)
        expect(page.get_by_role("button", name="Show all")).to_be_disabled()


def test_a_large_trace_by_mouse(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(traces["large"]) as page:
        shown(page)
        expect(page.locator("#verdict")).to_have_text(
            re.compile(
                rf"aten\._softmax made 7 NaN of 512 .* in step {LARGE_BAD_STEP}, forward pass of encoder\.layers\.7"
            )
        )
        expect(page.get_by_role("search").get_by_role("status")).to_have_text(
            re.compile(r"^100,000\s+operations")
        )
        canvas = timeline(page)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        start = pixels(canvas)
        # Wheel with Ctrl zooms around the pointer, dragging moves, a click selects.
        page.mouse.move(box["x"] + box["width"] * 0.62, box["y"] + 100)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -1200)
        page.keyboard.up("Control")
        page.wait_for_url(re.compile("from="))
        zoomed = query(page)
        assert 55_000 < int(zoomed["from"]) < 62_000 < int(zoomed["to"]) < 69_000
        assert pixels(canvas) != start
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.32, box["y"] + 100, steps=4)
        page.mouse.up()
        page.wait_for_url(lambda url: f"from={zoomed['from']}&" not in url)
        assert int(query(page)["from"]) > int(zoomed["from"])
        assert "op" not in query(page)
        screenshot(page, "trace-large")
        page.get_by_role("button", name="Show all").click()
        page.wait_for_url(lambda url: "from=" not in url)
        page.get_by_role("button", name="Show more").click()
        expect(page.locator("section", has=page.locator("#alerts")).get_by_role("listitem")).to_have_count(
            200
        )


def test_a_click_on_the_timeline_selects_the_operation(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(f"{traces['faulty']}?from=0&to=20") as page:
        shown(page)
        canvas = timeline(page)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        # The first operations of the step run in `embed`, which is the first row.
        page.mouse.click(box["x"] + box["width"] * 2.5 / 20, box["y"] + 10)
        page.wait_for_url(re.compile("op="))
        expect(page.locator("#operation")).to_have_text("aten.addmm.default")
        reads = page.get_by_role("list", name="Reads from")
        expect(reads.get_by_role("listitem").filter(has_text="embed.bias")).to_contain_text(
            "not written in this step"
        )
        expect(reads.get_by_role("button").last).to_contain_text("aten.t.default")
        expect(page.get_by_role("link", name="embed.bias")).to_be_visible()


def test_data_of_the_timeline(visit: Visit, traces: dict[str, str]) -> None:
    with visit.open(f"{traces['faulty']}?bad=1") as page:
        shown(page)
        page.locator("summary", has_text="Data").click()
        with page.expect_download() as download:
            page.get_by_role("button", name="CSV").click()
        lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
        assert lines[0] == "operation,step,phase,module,name,node,not_finite"
        assert lines[1].endswith(",5,forward,head,aten.log.default,,1")
        expect(page.locator("details pre")).to_contain_text("open_trace(run, 4, worker=0)")


def test_a_trace_that_cannot_be_diagnosed(visit: Visit, traces: dict[str, str]) -> None:
    """The other panes work, and start with the first alert."""
    visit.expect("413")
    with visit.open("/") as page:
        page.route(
            re.compile("/diagnosis"), lambda route: route.fulfill(status=413, json={"detail": "too large"})
        )
        page.goto(visit.url + traces["faulty"])
        shown(page)
        expect(page.locator("#verdict")).to_contain_text("Start with the first alert.")
        expect(page.get_by_role("main")).to_contain_text("could not be determined: too large")
        expect(page.locator("#operation")).to_have_text("aten.log.default")


def test_narrow_and_hostile(visit: Visit, traces: dict[str, str]) -> None:
    for name in ("faulty", "hostile"):
        with visit.open(traces[name], width=360, height=780) as page:
            shown(page)
            assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), name
            assert page.locator("main img").count() == 0
            assert not serious_findings(page)
            screenshot(page, f"trace-{name}-narrow")


def test_an_empty_trace_and_one_that_does_not_exist(visit: Visit, site: Site, traces: dict[str, str]) -> None:
    visit.expect("404")
    with visit.open(traces["empty"]) as page:
        settled(page)
        expect(page.get_by_role("main")).to_contain_text("The trace has no operations.")
        for path in ("/traces/nothing/0/1/2", "/traces/a/b/c/d"):
            page.goto(visit.url + site.run_path(RUN) + path)
            settled(page)
            expect(page.get_by_role("button", name="Try again")).to_be_visible()
            assert not serious_findings(page)
