"""Administration: queues, receivers with a test, silences, tokens."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.web.site import PROJECT, Site, Visit, check_themes, settled
from watchstep_services.auth import create_token, identify


def test_the_page(visit: Visit) -> None:
    with visit.open("/admin") as page:
        settled(page)
        expect(page.get_by_role("region", name="Queues")).to_contain_text("Runs to evaluate")
        expect(page.get_by_role("region", name="Table of tokens")).to_contain_text("this login")
        check_themes(page, "admin")


def test_the_administration_keeps_the_project(visit: Visit) -> None:
    with visit.open(f"/projects/{PROJECT}") as page:
        settled(page)
        page.get_by_role("link", name="Administration").click()
        expect(page).to_have_url(re.compile(rf"/admin\?project={PROJECT}$"))
        expect(page.get_by_role("navigation", name="Pages").get_by_role("link", name="Rules")).to_be_visible()


def test_a_token_is_created_shown_once_and_revoked(visit: Visit, site: Site) -> None:
    with visit.open("/admin") as page:
        settled(page)
        page.get_by_label("Name", exact=True).fill("a reader")
        page.get_by_role("button", name="Create a token").click()
        token = page.get_by_text(re.compile("^wst_")).inner_text()
        caller = identify(site.service.database, token)
        assert caller is not None
        assert caller.role == "viewer"
        page.get_by_role("button", name="Revoke a reader").click()
        expect(page.get_by_role("button", name="Revoke a reader")).to_have_count(0)
        assert identify(site.service.database, token) is None
        page.reload()
        settled(page)
        expect(page.get_by_text(token)).to_have_count(0)


def test_a_silence_begins_and_ends(visit: Visit) -> None:
    with visit.open("/admin") as page:
        settled(page)
        page.get_by_label("Alerts").fill("rule=none_like_it")
        page.get_by_label("Reason").fill("<b>maintenance</b>")
        page.get_by_role("button", name="Silence", exact=True).click()
        row = page.get_by_role("row").filter(has_text="none_like_it")
        expect(row).to_contain_text("active")
        expect(row).to_contain_text("<b>maintenance</b>")
        row.get_by_role("button", name=re.compile("End silence")).click()
        expect(row.get_by_role("button")).to_have_count(0)


def test_a_silence_that_matches_nothing_valid_is_explained(visit: Visit) -> None:
    visit.expect("422")
    with visit.open("/admin") as page:
        settled(page)
        page.get_by_label("Alerts").fill("no matcher")
        page.get_by_label("Reason").fill("x")
        page.get_by_role("button", name="Silence", exact=True).click()
        expect(page.get_by_role("alert").filter(has_text="matcher")).to_be_visible()


def test_a_viewer_is_offered_nothing_that_is_refused(visit: Visit, site: Site) -> None:
    token = create_token(site.service.database, "viewer", PROJECT)
    with visit.open("/admin", token=token) as page:
        settled(page)
        expect(page.get_by_role("heading", name=f"Silences of {PROJECT}")).to_be_visible()
        expect(page.get_by_role("button", name="Silence", exact=True)).to_have_count(0)
        expect(page.get_by_role("heading", name="Tokens")).to_have_count(0)
