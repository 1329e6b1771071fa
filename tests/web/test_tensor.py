"""The page of a tensor: what is wrong with it, its statistics and distribution over the steps, and its saved values."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.sdk.format.blocks import Row, block_of, tensor
from tests.services.recording import Recording
from tests.web.site import (
    PROJECT,
    Site,
    Visit,
    changed_answers,
    check_themes,
    drag,
    is_wider_than_window,
    query,
    screenshot,
    serious_findings,
    settled,
    shown,
)
from watchstep.format import segment
from watchstep.format.layout import SnapshotKey
from watchstep.format.snapshot import PARTS, Described, TensorPart, header
from watchstep.format.tensors import Placement
from watchstep.store.store import Store
from watchstep_services.auth import create_token

HOSTILE = "<img src=x onerror=alert(1)>\n\u202ereversed\u202c " + "w" * 600
GRADIENT = "7.bias:gradient"
OTHER_PROJECT = "tensors"
SHARDED = "run-1"
LARGE = (2, 1100, 1000)
TIMES = " \N{MULTIPLICATION SIGN} "


def path_of(site: Site, name: str, query: str = "", run: str | None = None) -> str:
    return f"{site.run_path(run or site.faulty)}/tensors/{quote(name, safe='')}{query}"


def section(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def player(page: Page) -> Locator:
    return page.get_by_role("slider", name="Step", exact=True)


def test_what_is_wrong_and_where(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, GRADIENT)) as page:
        shown(page)
        verdict = page.locator("#verdict")
        expect(verdict).to_have_text(re.compile(r"Bad from step \d+: nan_or_inf and another rule"))
        bad = re.search(r"step (\d+)", verdict.inner_text())
        assert bad is not None
        card = page.locator("section", has=verdict)
        expect(card).to_contain_text(f"NaN or infinite: 10 of 10 elements at step {bad[1]}")
        expect(player(page)).to_have_attribute("aria-valuetext", f"step {bad[1]}")
        expect(section(page, "Saved tensor")).to_contain_text("10, 0, 0")
        check_themes(page, "tensor")
        card.get_by_role("link", name="nan_or_inf").click()
        expect(page).to_have_url(re.compile(r"/alerts/[0-9a-f]+$"))


def test_a_healthy_tensor(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, "5.weight", run=site.healthy)) as page:
        shown(page)
        expect(page.locator("#verdict")).to_have_text(re.compile("None of the .* found anything"))
        expect(section(page, "Saved tensor")).to_contain_text("The full tensor is not saved at any step.")
        page.get_by_text("Rules that watch this tensor (").click()
        expect(page.get_by_role("listitem").filter(has_text="nan_or_inf")).to_be_visible()


def test_the_address_holds_statistics_scale_and_steps(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, GRADIENT)) as page:
        shown(page)
        statistics = section(page, "Statistics")
        expect(statistics.get_by_role("heading", level=3)).to_have_count(4)
        expect(statistics).to_contain_text("vanishing_gradient below 1e\N{MINUS SIGN}7")
        statistics.get_by_label("Add a statistic").select_option("std")
        expect(statistics.get_by_role("heading", name="standard deviation")).to_be_visible()
        statistics.get_by_role("button", name="Remove L2 norm").click()
        statistics.get_by_label("Scale").select_option("log")
        settled(page)
        drag(page, statistics.locator(".u-over").first, 0.1, 0.5)
        expect(statistics.get_by_role("button", name="Show all steps")).to_be_enabled()
        state = query(page)
        assert state["figures"] == "abs_mean,abs_max,zero_share,std"
        assert state["scale"] == "log"
        assert 0 < int(state["from"]) < int(state["to"]) < 200
        page.reload()
        shown(page)
        assert query(page) == state
        expect(statistics.get_by_role("heading", name="standard deviation")).to_be_visible()
        expect(statistics.get_by_role("heading", name="L2 norm")).to_have_count(0)
        expect(statistics.get_by_label("Scale")).to_have_value("log")
        statistics.get_by_role("button", name="Show all steps").click()
        settled(page)
        assert "from" not in query(page)
        statistics.locator(".u-over").first.click()
        expect(page).to_have_url(re.compile(r"[?&]step=\d+"))


def test_the_slider_selects_and_plays_steps(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, GRADIENT, "?step=0")) as page:
        shown(page)
        expect(player(page)).to_have_attribute("aria-valuetext", "step 0")
        player(page).press("ArrowRight")
        expect(page).to_have_url(re.compile("step=1$"))
        player(page).press("End")
        expect(page.get_by_role("button", name="Next record")).to_be_disabled()
        page.get_by_role("button", name="Previous record").click()
        player(page).press("Home")
        expect(page).to_have_url(re.compile("step=0$"))
        # The page is opened with reduced motion: one record a second.
        page.clock.install()
        player(page).press(" ")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        page.clock.run_for(3_500)
        page.get_by_role("button", name="Pause").click()
        expect(player(page)).to_have_value("3")
        expect(page).to_have_url(re.compile(r"step=[1-9]\d*$"))
        page.get_by_label("Speed").select_option("20")
        assert query(page)["speed"] == "20"


def test_heat_and_ridges(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, "1:output")) as page:
        shown(page)
        distribution = section(page, "Distribution")
        heat = distribution.get_by_role("img", name="Distribution of the elements over the steps")
        caption = distribution.locator("figcaption").first
        for x in range(60, 600, 5):  # which steps were measured depends on the speed of the machine
            heat.hover(position={"x": x, "y": 60})
            expect(caption).to_contain_text(re.compile(r"steps? \d+.*(elements|not measured)"))
            if "elements" in caption.inner_text():
                break
        expect(caption).to_contain_text("elements")
        heat.click(position={"x": 70, "y": 60})
        expect(page).to_have_url(re.compile(r"step=\d+"))
        distribution.get_by_role("button", name="Ridges").click()
        assert query(page)["view"] == "ridge"
        page.reload()
        shown(page)
        ridges = distribution.get_by_role("img", name="Outlines of the distribution")
        screenshot(page, "tensor-ridges")
        ridges.click(position={"x": 200, "y": 80})
        expect(player(page)).to_have_value(re.compile("[0-9]+"))
        assert serious_findings(page) == []


def test_slices_of_a_saved_tensor(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, "2.weight")) as page:
        shown(page)
        saved = section(page, "Saved tensor")
        expect(saved).to_contain_text(TIMES.join(["128", "64", "3", "3"]))
        saved.get_by_role("combobox", name="Rows").select_option("0")
        saved.get_by_role("combobox", name="Columns").select_option("1")
        saved.get_by_role("spinbutton", name="Dimension 3").fill("2")
        saved.get_by_role("spinbutton", name="Dimension 3").press("Enter")
        settled(page)
        assert query(page)["slice"] == "r,c,0,2"
        values = saved.get_by_role("application", name="Values of the slice")
        values.press("ArrowRight")
        values.press("ArrowDown")
        value = saved.get_by_role("status")
        expect(value).to_have_text(re.compile("^\\[1, 0, 0, 2\\] = \N{MINUS SIGN}?[0-9.e\N{MINUS SIGN}]+$"))
        text = value.inner_text()
        page.reload()
        shown(page)
        expect(value).to_have_text(text)
        worst = saved.get_by_role("table").get_by_role("button").first
        index = worst.inner_text()
        worst.click()
        expect(value).to_contain_text(f"{index} = ")
        saved.get_by_label("Bars").select_option("powers")
        expect(
            saved.get_by_role("img", name="Histogram of the saved values by powers of two")
        ).to_be_visible()


def test_the_neighbours(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, GRADIENT, "?step=158")) as page:
        shown(page)
        beside = page.get_by_role("navigation", name="Neighbouring tensors")
        expect(beside.get_by_role("link", name="bias:gradient", exact=True)).to_have_attribute(
            "aria-current", "page"
        )
        beside.get_by_role("link", name="weight", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("7.weight")
        assert query(page) == {"step": "158"}
        shown(page)
        beside.get_by_role("link", name="previous weight").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("5.weight")
        shown(page)
        expect(beside.get_by_role("link", name="next weight")).to_contain_text("7.weight")


def test_a_loss_has_its_values_only(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, "loss")) as page:
        shown(page)
        expect(section(page, "Statistics").get_by_role("heading", level=3)).to_have_count(1)
        expect(section(page, "Distribution")).to_have_count(0)


@pytest.fixture(scope="module")
def sharded(site: Site) -> str:
    """A run with a gradient in two shards, of which worker 0 saved a large tensor and worker 1 a part of one; and a hostile name."""
    recording = Recording(Store.open(str(site.store)), project=OTHER_PROJECT).begin(world_size=2)
    weight, hostile = tensor("layer.weight", "weights", shape=LARGE), tensor(HOSTILE, "weights")
    for worker in range(2):
        rows = [
            Row(step, info, [step + worker + 1.0, -2.0], worker=worker, place=Placement(worker, 2))
            for step in range(6)
            for info in (weight, hostile)
        ]
        recording.store.put(recording.key(0, 0, 5, worker).path, segment.encode(block_of(rows)))
        recording.end(last_step=5, worker=worker)
    values = (np.arange(np.prod(LARGE), dtype=np.float32) % 1000).reshape(LARGE)
    values[1, 1099, 998] = np.nan
    whole = header([Described("layer.weight", "F32", LARGE)], {}) + values.tobytes()
    recording.store.put(SnapshotKey("a1", 0, 5, "train", "").path, whole)
    part = TensorPart((4, 3), (2, 0), True)
    parts = json.dumps({"layer.weight": part.as_data()})
    described = header([Described("layer.weight", "BF16", (2, 3))], {PARTS: parts})
    bits = (np.arange(6, dtype=np.float32).view(np.uint32) >> 16).astype("<u2")
    recording.store.put(SnapshotKey("a1", 1, 5, "train", "").path, described + bits.tobytes())
    answer = httpx.post(
        f"{site.url}/v1/projects/{OTHER_PROJECT}/runs",
        json={"run": SHARDED},
        headers={"authorization": f"Bearer {site.service.operator_token}"},
    )
    assert answer.status_code < 300, answer.text
    return f"/projects/{OTHER_PROJECT}/runs/{SHARDED}/tensors/"


def test_large_tensors_are_read_in_parts(visit: Visit, sharded: str) -> None:
    with visit.open("/") as page:
        ranges: list[str] = []
        page.on("request", lambda request: ranges.append(request.headers.get("range", "")))
        page.goto(f"{visit.url}{sharded}layer.weight?saved=a1/0/5/train&slice=1,r,c")
        shown(page)
        saved = section(page, "Saved tensor")
        pages = saved.get_by_role("group", name="Part of the slice")
        expect(pages).to_contain_text("to 127 of 1,100")
        saved.get_by_role("button", name="Later columns").click()
        expect(pages).to_contain_text("to 255 of 1,000")
        assert query(page)["at"] == "0,128"
        spans = [[int(number) for number in text[6:].split("-")] for text in ranges if text]
        assert 0 < sum(end - first + 1 for first, end in spans) < 2_000_000
        saved.get_by_role("button", name="Read all 2,200,000 elements").click()
        worst = saved.get_by_role("table").get_by_role("button").first
        expect(worst).to_have_text("[1, 1099, 998]")
        worst.click()
        settled(page)
        expect(saved.get_by_role("status")).to_have_text("[1, 1099, 998] = NaN")
        assert query(page)["at"] == "1024,896"


def test_workers(visit: Visit, sharded: str) -> None:
    with visit.open(f"{sharded}layer.weight?figures=max&step=5") as page:
        shown(page)
        statistics = section(page, "Statistics")
        expect(statistics.locator(".entry")).to_have_count(1)
        statistics.get_by_label("Workers").select_option("separate")
        expect(statistics.locator(".entry")).to_have_text(
            [re.compile("worker 0 6"), re.compile("worker 1 7")]
        )
        assert query(page)["workers"] == "separate"
        statistics.get_by_label("Workers").select_option("1")
        expect(statistics.locator(".entry")).to_have_text([re.compile("max 7")])
        saved = section(page, "Saved tensor")
        # A key that is pressed before the elements have come is lost with the table of the worker before.
        with page.expect_response(lambda response: response.status == 206):
            saved.get_by_label("Saved at").select_option(label="step 5, worker 1")
        expect(saved).to_contain_text(f"from [2, 0], 2{TIMES}3 of 4{TIMES}3")
        saved.get_by_role("application").press("End")
        expect(saved.get_by_role("status").last).to_have_text("[2, 2] = 2")


def test_a_narrow_screen(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, "5.weight"), width=360, height=740) as page:
        shown(page)
        assert not is_wider_than_window(page)
        assert serious_findings(page) == []
        screenshot(page, "tensor-narrow")


def test_hostile_names_are_text(visit: Visit, sharded: str) -> None:
    def hostile(view: dict[str, Any]) -> None:
        finding = {"attempt": "a1", "step": 3, "mode": "train", "worker": 0, "value": 1, "threshold": 0}
        view["rules"] = [
            {
                "name": HOSTILE,
                "rule": HOSTILE,
                "severity": "critical",
                "thresholds": [{"figure": "mean", "parameter": HOSTILE, "value": 1.0, "side": "above"}],
                "findings": [finding | {"message": HOSTILE}],
                "left_out": 0,
            }
        ]
        view["neighbours"] |= {"previous": HOSTILE, "next": HOSTILE, "module": [view["tensor"]] * 1}

    with visit.open("/", width=700) as page:
        settled(page)
        changed_answers(page, re.compile(r"/tensor\?"), hostile)
        visit.expect("404")  # the snapshots do not contain it
        page.goto(f"{visit.url}{sharded}{quote(HOSTILE, safe='')}")
        shown(page)
        expect(page.get_by_role("heading", level=1)).to_contain_text("<img src=x")
        expect(page.get_by_role("main").locator("img")).to_have_count(0)
        expect(section(page, "Saved tensor")).to_contain_text("This object does not contain the tensor.")
        assert not is_wider_than_window(page)


def test_a_tensor_that_cannot_be_shown(visit: Visit, site: Site) -> None:
    visit.expect("404", "403")
    with visit.open(path_of(site, "absent")) as page:
        expect(page.get_by_role("main")).to_contain_text("absent")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
    token = create_token(site.service.database, "viewer", "another-project")
    with visit.open(path_of(site, GRADIENT), token=token) as page:
        expect(page.get_by_role("main")).to_contain_text("Your token may not read the tensor.")
    viewer = create_token(site.service.database, "viewer", PROJECT)
    with visit.open(path_of(site, GRADIENT), token=viewer) as page:
        shown(page)
        expect(page.locator("#verdict")).to_contain_text("nan_or_inf")


def test_steps_without_records(visit: Visit, site: Site) -> None:
    with visit.open(path_of(site, GRADIENT, "?from=100000&to=100020")) as page:
        shown(page)
        expect(section(page, "Statistics")).to_contain_text("Not recorded in these steps.")
        expect(section(page, "Distribution")).to_contain_text("No distribution is recorded in these steps.")
