"""The page of a run: what happened, losses and rules over the steps, layers by step, and the way to the faulty layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, expect

from tests.web.site import (
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

HOSTILE = "<img src=x onerror=alert(1)>\n\u202ereversed\u202c " + "w" * 4000


def open_changed(visit: Visit, page: Page, path: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Open a run whose overview is changed on its way to the page."""
    changed_answers(page, re.compile("/overview"), change)
    page.goto(visit.url + path)


def test_what_happened_and_the_way_to_the_layer(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        verdict = page.locator("#verdict")
        expect(verdict).to_have_text(
            re.compile(
                r"Bad from step \d+, stopped by nan_or_inf, ended after step \d+, \d+ steps? lost; first bad tensor: model:input"
            )
        )
        step = re.search(r"step (\d+)", verdict.inner_text())
        assert step is not None
        expect(page.get_by_role("heading", level=1)).to_have_text(site.faulty)
        expect(page.get_by_role("main")).to_contain_text("follows from nan_or_inf")
        check_themes(page, "run")
        verdict.get_by_role("link", name="model:input").click()
        assert page.url.endswith(f"/tensors/model%3Ainput?step={step[1]}")
        page.go_back()
        shown(page)
        page.get_by_role("link", name="See the evidence").click()
        assert "/alerts/" in page.url


def test_a_run_without_alerts_says_so(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.healthy)) as page:
        shown(page)
        expect(page.locator("#verdict")).to_have_text(
            re.compile(r"Completed, ended after step \d+, without an alert")
        )
        expect(page.get_by_role("link", name="See the evidence")).to_have_count(0)
        page.get_by_role("link", name="demo", exact=True).click()
        assert urlsplit(page.url).path == "/projects/demo"


def test_the_address_holds_the_zoom_of_all_pictures(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        last = int(page.get_by_label("to", exact=True).input_value())
        drag(page, page.locator(".u-over").first, 0.2, 0.6)
        page.wait_for_url(re.compile("from="))
        zoom = query(page)
        assert abs(int(zoom["from"]) - 0.2 * last) < 3
        assert abs(int(zoom["to"]) - 0.6 * last) < 3
        page.reload()
        shown(page)
        expect(page.get_by_label("Steps", exact=True)).to_have_value(zoom["from"])
        expect(page.get_by_label("to", exact=True)).to_have_value(zoom["to"])
        page.get_by_label("to", exact=True).fill("150")
        page.get_by_label("to", exact=True).press("Enter")
        page.wait_for_url(re.compile("to=150"))
        drag(page, page.get_by_role("application"), 0.25, 0.75)
        page.wait_for_url(lambda url: "to=150" not in url)
        assert int(zoom["from"]) < int(query(page)["from"]) < int(query(page)["to"]) < 150
        settled(page)
        page.get_by_role("application").press("Escape")
        page.wait_for_url(lambda url: "from=" not in url)
        expect(page.get_by_role("button", name="Show all steps")).to_be_disabled()


def test_smoothing_and_scale_of_the_losses(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        page.get_by_label("Smoothing").fill("0.6")
        page.get_by_label("Smoothing").dispatch_event("change")
        page.get_by_label("Log scale").check()
        page.wait_for_url(re.compile("log=1"))
        assert query(page)["smooth"] == "0.6"
        page.reload()
        shown(page)
        expect(page.get_by_label("Smoothing")).to_have_value("0.6")
        expect(page.get_by_label("Log scale")).to_be_checked()
        box = page.locator(".u-over").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 20)
        expect(page.get_by_text("not finite")).to_be_visible()  # the loss after the fault


def test_lanes_of_rules(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        lanes = page.locator(".lane")
        expect(lanes.filter(has_text="nan_or_inf")).to_contain_text(re.compile(r"firing, from step \d+"))
        expect(lanes.filter(has_text="vanishing_gradient")).to_have_count(0)
        page.get_by_role("button", name="more rules without an alert").click()
        expect(lanes.filter(has_text="vanishing_gradient")).to_have_count(1)
        assert query(page)["rules"] == "all"
        expect(lanes.filter(has_text="class_imbalance")).to_contain_text("no data")
        page.get_by_role("link", name=re.compile(r"Step \d+: nan_or_inf fires")).click()
        assert "/alerts/" in page.url
        page.go_back()
        shown(page)
        page.get_by_text(re.compile("All events")).click()
        expect(page.get_by_role("region", name="Events")).to_contain_text("stop done")


def test_layers_by_keys(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        layers = page.get_by_role("application")
        expect(layers).to_have_attribute("aria-label", re.compile("^l2 by layer and step"))
        layers.focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
            layers.press(key)
        status = page.get_by_role("status").filter(has_text="0.weight:gradient")
        expect(status).to_contain_text(re.compile(r"steps? \d+"))
        layers.press("Enter")
        page.wait_for_url(re.compile(r"/tensors/0\.weight%3Agradient\?step=\d+"))


def test_layers_by_mouse(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        fault = re.search(r"step (\d+)", page.locator("#verdict").inner_text())
        assert fault is not None
        steps = int(page.get_by_label("to", exact=True).input_value()) + 1
        layers = page.get_by_role("application")
        layers.scroll_into_view_if_needed()
        box = layers.bounding_box()
        assert box is not None
        x = box["x"] + box["width"] * (int(fault[1]) + 0.5) / steps
        y = box["y"] + box["height"] - 5  # the last row
        page.mouse.move(x, y)
        expect(page.get_by_text("NaN or infinite elements")).to_be_visible()
        page.mouse.click(x, y)
        page.wait_for_url(
            re.compile(r"/tensors/7\.weight%3Agradient\?step=\d+$")
        )  # of a column of steps, the first


def test_choices_of_the_layers(visit: Visit, site: Site, tmp_path: Path) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        tree = page.get_by_role("list", name="Modules and tensors")
        page.get_by_label("Statistic").select_option("abs_max")
        page.locator("#layers ~ .controls").get_by_label("Collection").select_option("activations")
        expect(tree.get_by_role("link", name="5:output")).to_be_visible()
        page.get_by_label("Search layers").fill("relu")
        expect(tree.get_by_role("link")).to_have_count(3)
        page.get_by_label("Log colours").uncheck()
        state = query(page)
        assert state == {
            "figure": "abs_max",
            "collection": "activations",
            "layer": "relu",
            "scale": "linear",
        }
        page.reload()
        shown(page)
        expect(tree.get_by_role("link")).to_have_count(3)
        page.get_by_label("Search layers").fill("nothing like it")
        page.get_by_role("button", name="Show all layers").click()
        expect(tree.get_by_role("link", name="5:output")).to_be_visible()
        data = page.locator("section", has=page.locator("#layers")).locator("details")
        data.get_by_text("Data", exact=True).click()
        expect(data).to_contain_text('run.heatmap("activations", "abs_max"')
        with page.expect_download() as download:
            data.get_by_role("button", name="CSV").click()
        download.value.save_as(tmp_path / "layers.csv")
        assert (tmp_path / "layers.csv").read_text().startswith('"tensor","first_step","last_step","mean"')


def test_modules_open_and_close(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        tree = page.get_by_role("list", name="Modules and tensors")
        module = tree.get_by_role("button", name=re.compile("^5 Linear"))
        expect(module).to_have_attribute("aria-expanded", "true")
        expect(tree.get_by_role("link")).to_have_count(8)
        module.press("Enter")
        expect(module).to_have_attribute("aria-expanded", "false")
        expect(tree.get_by_role("link")).to_have_count(6)
        page.reload()
        shown(page)
        expect(module).to_have_attribute("aria-expanded", "false")


def test_number_formats_and_saved_tensors(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        shown(page)
        page.get_by_role("radio", name="bf16").check()
        assert query(page)["format"] == "bf16"
        expect(page.get_by_text("All 8 tensors fit bf16.")).to_be_visible()
        snapshot = page.locator("details", has_text=re.compile(r"Step \d+ train"))
        snapshot.locator("summary").click()
        snapshot.get_by_role("link", name="7.bias:gradient").click()
        page.wait_for_url(re.compile(r"/tensors/7\.bias%3Agradient\?step="))


def test_narrow_screen(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty) + "?rules=all", width=360, dark=True) as page:
        shown(page)
        assert not is_wider_than_window(page)
        assert not serious_findings(page)
        screenshot(page, "run-narrow")


def test_a_running_run_is_followed(visit: Visit, site: Site) -> None:
    with visit.open("/") as page:
        settled(page)
        step = iter(range(900, 10_000))

        def running(overview: dict[str, Any]) -> None:
            overview["run"] |= {"state": "running", "last_step": next(step), "ended_ns": None}

        page.clock.install()
        open_changed(visit, page, site.run_path(site.healthy), running)
        expect(page.locator("#verdict")).to_have_text("Running, step 900: no alert")
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        page.clock.run_for(5_000)
        expect(page.locator("#verdict")).not_to_have_text("Running, step 900: no alert")
        page.unroute_all(behavior="ignoreErrors")


def test_a_run_without_data(visit: Visit, site: Site) -> None:
    def empty(overview: dict[str, Any]) -> None:
        overview["run"] |= {"state": "created", "last_step": -1, "rate": None}
        overview["grid"] = {"first": 0, "last": -1, "edges": [], "time_ns": []}
        for group in ("losses", "optimizer", "metrics"):
            overview[group] = {"lines": [], "left_out": 0}
        overview |= {"collections": {}, "marks": [], "lanes": [], "attempts": []}

    with visit.open("/") as page:
        settled(page)
        open_changed(visit, page, site.run_path(site.healthy), empty)
        shown(page)
        expect(page.locator("#verdict")).to_have_text("Registered, no data yet")
        expect(page.get_by_role("main")).to_contain_text("No step is recorded yet.")
        assert not serious_findings(page)


def test_names_are_text(visit: Visit, site: Site) -> None:
    def hostile(overview: dict[str, Any]) -> None:
        for number, line in enumerate(overview["losses"]["lines"] + overview["optimizer"]["lines"]):
            line["tensor"] = f"{HOSTILE}{number}"
        for mark in overview["marks"]:
            mark |= {"title": HOSTILE, "causes": [HOSTILE]}
        for lane in overview["lanes"][:2]:
            lane["problem"] = HOSTILE
        overview["run"] |= {"tags": [HOSTILE[:64]], "reason": HOSTILE}
        overview["links"] = [{"name": HOSTILE[:64], "url": "https://wandb.example/run"}]
        overview["health"]["recorders"][0]["notes"] = {HOSTILE: HOSTILE}
        overview["configuration"] |= {"environment": {HOSTILE: HOSTILE}, "config": {HOSTILE: HOSTILE}}

    with visit.open("/", width=800) as page:
        settled(page)
        open_changed(visit, page, site.run_path(site.faulty), hostile)
        shown(page)
        expect(page.locator("#verdict")).to_contain_text("<img src=x")
        expect(page.get_by_role("main").locator("img")).to_have_count(0)
        expect(page.get_by_role("link", name="(wandb.example)")).to_have_attribute(
            "href", "https://wandb.example/run"
        )
        assert not is_wider_than_window(page)


def test_a_run_that_cannot_be_shown(visit: Visit, site: Site) -> None:
    visit.expect("404", "403", "500")
    with visit.open(site.run_path("absent")) as page:
        expect(page.get_by_role("main")).to_contain_text("absent")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
    with visit.open("/") as page:
        settled(page)
        refusal = {"title": "Forbidden", "status": 403, "detail": "no", "hint": "ask an administrator"}
        page.route(re.compile("/overview"), lambda route: route.fulfill(status=403, json=refusal))
        page.goto(site.url + site.run_path(site.faulty))
        expect(page.get_by_role("main")).to_contain_text("Your token may not read the run.")
    with visit.open("/") as page:
        settled(page)
        page.route(re.compile("/heatmap"), lambda route: route.fulfill(status=500, json={"detail": "broken"}))
        page.goto(site.url + site.run_path(site.faulty))
        shown(page)
        expect(page.locator("section", has=page.locator("#layers"))).to_contain_text("broken")
        expect(page.locator("#verdict")).to_contain_text("stopped by")  # the other parts are shown
