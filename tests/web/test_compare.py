"""The comparison of runs: where they first differ, series on a common axis, and settings that differ."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.web.site import (
    PROJECT,
    Site,
    Visit,
    changed_answers,
    check_themes,
    is_wider_than_window,
    screenshot,
    serious_findings,
    settled,
)
from watchstep_services.auth import create_token

HOSTILE = "<img src=x onerror=alert(1)>\u202e\n" + "x" * 4000


@pytest.fixture
def path(site: Site) -> str:
    """Path of the comparison of both runs."""
    return f"/projects/{PROJECT}/compare?runs={site.healthy},{site.faulty}"


def card(page: Page, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def test_the_first_difference_and_the_losses(visit: Visit, site: Site, path: str) -> None:
    with visit.open(path) as page:
        settled(page)
        difference = card(page, "First difference")
        # Losses are recorded at each step. Inputs, which differ first, are measured at some.
        differs = re.compile(
            rf"{site.faulty} first differs from {site.healthy} at\s+step \d+ in\s+(loss|model:input)"
        )
        expect(difference).to_contain_text(differs)
        found = differs.search(difference.inner_text())
        assert found is not None
        name = found[1]
        if name == "loss":
            expect(card(page, "Series")).to_contain_text(f"{site.faulty} differs here first")
        expect(card(page, "Series")).to_contain_text(f"{site.faulty}: not finite from step")
        expect(card(page, "Differing settings")).to_contain_text("--fault")  # of the command line
        check_themes(page, "compare")
        difference.get_by_role("link", name=name, exact=True).click()
        expect(page).to_have_url(
            re.compile(rf"{re.escape(site.run_path(site.faulty))}/tensors/{quote(name)}\?step=\d+")
        )


def test_the_address_holds_the_choices(visit: Visit, path: str) -> None:
    with visit.open(path) as page:
        settled(page)
        field = page.get_by_label("Add a tensor")
        field.fill("7.weight:gradient")
        field.press("Enter")
        expect(page.get_by_label("Figure")).to_have_value("l2")
        page.get_by_label("Figure").select_option("rms")
        page.get_by_role("button", name="By time").click()
        expect(page).to_have_url(re.compile("tensor=7.weight%3Agradient&figure=rms&align=time"))
        page.reload()
        settled(page)
        expect(page.get_by_role("heading", name="rms of 7.weight:gradient")).to_be_visible()
        expect(page.get_by_role("button", name="By time")).to_have_attribute("aria-pressed", "true")
        expect(card(page, "Series")).to_contain_text("seconds since the first step")
        page.get_by_role("button", name="Remove 7.weight:gradient").click()
        expect(page.get_by_role("heading", name="loss", exact=True)).to_be_visible()


def test_zooming_by_dragging(visit: Visit, path: str) -> None:
    with visit.open(path) as page:
        settled(page)
        page.get_by_role("img").first.scroll_into_view_if_needed()
        box = page.get_by_role("img").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 300, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 60, steps=3)
        page.mouse.up()
        expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
        expect(card(page, "First difference")).to_contain_text("first differs")
        page.get_by_role("button", name="Show all steps").click()
        expect(page).not_to_have_url(re.compile("from="))


def test_runs_are_removed_added_and_made_the_reference(visit: Visit, site: Site, path: str) -> None:
    with visit.open(path) as page:
        settled(page)
        page.get_by_role("button", name=f"Make reference: {site.faulty}").click()
        expect(page).to_have_url(re.compile(f"runs={site.faulty},{site.healthy}"))
        expect(card(page, "First difference")).to_contain_text(
            f"{site.healthy} first differs from {site.faulty}"
        )
        page.get_by_role("button", name=f"Remove {site.healthy}").click()
        expect(page.get_by_role("main")).to_contain_text("Choose another run.")
        field = page.get_by_label("Add a run")
        field.fill(site.healthy)
        field.press("Enter")
        settled(page)
        expect(card(page, "First difference")).to_contain_text("first differs")
        page.go_back()
        expect(page.get_by_role("main")).to_contain_text("Choose another run.")


def test_nothing_chosen_says_what_to_do(visit: Visit) -> None:
    with visit.open(f"/projects/{PROJECT}/compare") as page:
        expect(page.get_by_role("main")).to_contain_text("Choose two to eight runs.")
        assert serious_findings(page) == []


def test_a_run_that_does_not_exist_says_so(visit: Visit, path: str) -> None:
    visit.expect("404")
    with visit.open(f"{path},absent") as page:
        expect(card(page, "First difference")).to_contain_text("absent")
        page.get_by_role("button", name="Remove absent").click()
        expect(card(page, "First difference")).to_contain_text("first differs")


def test_a_token_without_permission_is_told_so(visit: Visit, site: Site, path: str) -> None:
    token = create_token(site.service.database, "viewer", "another-project")
    visit.expect("403", "404")
    with visit.open(path, token=token) as page:
        expect(page.get_by_role("main")).to_contain_text("may not read the series")


def test_differing_settings_and_names_are_text(visit: Visit, site: Site, path: str) -> None:
    def change(comparison: dict[str, Any]) -> None:
        comparison["settings"]["differing"] = [
            {"source": "hyperparameter", "name": "learning_rate", "values": [0.01, 0.1], "step": 30},
            {"source": "environment", "name": HOSTILE, "values": [HOSTILE, None], "step": None},
        ]
        for divergence in comparison["divergences"]:
            divergence["first"]["tensor"] = HOSTILE
            divergence["tensors"][0]["tensor"] = HOSTILE
        for series in comparison["series"]:
            series["tensor"] = HOSTILE

    with visit.open(f"/projects/{PROJECT}", width=360) as page:
        changed_answers(page, "**/comparison?*", change)
        page.goto(visit.url + path)
        settled(page)
        settings = card(page, "Differing settings")
        expect(settings.get_by_role("row", name="learning_rate")).to_contain_text("0.01")
        expect(settings).to_contain_text("not set")
        expect(card(page, "First difference")).to_contain_text("<img src=x onerror=alert(1)>")
        assert page.locator("main img").count() == 0
        assert not is_wider_than_window(page)
        assert serious_findings(page) == []


def test_a_narrow_screen(visit: Visit, path: str) -> None:
    with visit.open(path, width=360, height=780) as page:
        settled(page)
        assert not is_wider_than_window(page)
        assert serious_findings(page) == []
        screenshot(page, "compare-narrow")
