"""The table of runs: what it shows, its filters and order, and the selection for a comparison."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.web.site import PROJECT, Site, Visit, check_themes, screenshot, serious_findings, settled
from watchstep_services.auth import create_token

RUNS = f"/projects/{PROJECT}"


def test_the_table(visit: Visit, site: Site) -> None:
    with visit.open(RUNS) as page:
        settled(page)
        rows = page.get_by_role("row")
        expect(rows.filter(has_text=site.faulty)).to_contain_text("stopped")
        expect(rows.filter(has_text=site.faulty)).to_contain_text("firing")
        expect(rows.filter(has_text=site.healthy)).to_contain_text("completed")
        expect(rows.filter(has_text=site.healthy)).to_contain_text("none")
        check_themes(page, "runs")
        page.get_by_role("link", name=site.faulty).click()
        expect(page).to_have_url(re.compile(re.escape(site.run_path(site.faulty))))


def test_the_address_holds_filters_and_order(visit: Visit, site: Site) -> None:
    with visit.open(RUNS) as page:
        settled(page)
        page.get_by_role("button", name="stopped").click()
        expect(page.get_by_role("link", name=site.healthy)).to_have_count(0)
        page.get_by_placeholder("Search by name or tag").fill("faul")
        expect(page).to_have_url(re.compile("search=faul"))
        page.get_by_role("link", name="Step", exact=True).click()
        expect(page).to_have_url(re.compile("sort=step"))
        page.reload()
        settled(page)
        expect(page.get_by_role("button", name="stopped")).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_placeholder("Search by name or tag")).to_have_value("faul")
        expect(page.get_by_role("link", name=site.faulty)).to_be_visible()
        page.get_by_placeholder("Search by name or tag").fill("no run has this name")
        expect(page.get_by_role("main")).to_contain_text("No run matches the filters.")
        page.get_by_role("button", name="Show all runs").click()
        expect(page.get_by_role("link", name=site.healthy)).to_be_visible()


def test_runs_are_selected_for_a_comparison(visit: Visit, site: Site) -> None:
    with visit.open(RUNS) as page:
        page.get_by_label(f"Compare {site.healthy}").check()
        expect(page.get_by_role("region", name="Comparison")).to_contain_text("Select another run")
        page.get_by_label(f"Compare {site.faulty}").check()
        page.get_by_role("region", name="Comparison").get_by_role("link", name="Compare").click()
        expect(page).to_have_url(re.compile(r"/compare\?runs="))
        settled(page)


def test_a_narrow_screen_scrolls_the_table_only(visit: Visit) -> None:
    with visit.open(RUNS, width=360, height=700) as page:
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert serious_findings(page) == []
        screenshot(page, "runs-narrow")


def test_a_project_without_runs_says_what_to_do(visit: Visit, site: Site) -> None:
    token = create_token(site.service.database, "viewer", "empty-project")
    visit.expect("404")
    with visit.open("/", token=token) as page:
        expect(page.get_by_role("main")).to_contain_text("empty-project")


def test_a_token_without_permission_is_told_so(visit: Visit, site: Site) -> None:
    token = create_token(site.service.database, "viewer", "another-project")
    visit.expect("403", "404")
    with visit.open(RUNS, token=token) as page:
        expect(page.get_by_role("main")).to_contain_text("may not read the runs")
