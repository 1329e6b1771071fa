"""What all pages share: login, navigation, themes, errors, and the policy that the browser enforces."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Browser, Route, expect

from benchmarks.dashboard_run import PROJECT as LARGE_PROJECT
from benchmarks.dashboard_run import RUN as LARGE_RUN
from benchmarks.dashboard_run import make_run
from tests.web.site import PROJECT, Site, Visit, check_themes, serious_findings, settled
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService


def test_the_link_of_serve_logs_in_and_leaves_no_token_in_the_address(visit: Visit) -> None:
    with visit.open("/") as page:
        expect(page.get_by_role("banner")).to_contain_text("admin")
        assert "token" not in page.url
        page.reload()
        expect(page.get_by_role("banner")).to_contain_text("admin")
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("heading", name="Log in to Watchstep")).to_be_visible()


def test_a_link_does_not_replace_a_session_unasked(visit: Visit, site: Site) -> None:
    """Otherwise somebody's link would have a person work in a session that is not hers."""
    theirs = create_token(site.service.database, "viewer", PROJECT)
    with visit.open("/") as page:
        settled(page)
        for button, role in (("Keep the present session", "admin"), ("Log in with the link", "viewer")):
            page.goto("about:blank")
            page.goto(f"{site.url}/projects/{PROJECT}#token={theirs}")
            expect(page.get_by_role("heading", name="Log in with this link?")).to_be_visible()
            expect(page.get_by_role("main")).to_contain_text(f"viewer of project {PROJECT}")
            assert "token" not in page.url
            check_themes(page, "session")
            page.get_by_role("button", name=button).click()
            expect(page.get_by_role("banner")).to_contain_text(role)
            page.reload()
            expect(page.get_by_role("banner")).to_contain_text(role)


def test_a_link_replaces_a_session_that_has_ended(visit: Visit, site: Site) -> None:
    visit.expect("401")
    with visit.open("/", token="wst_ended") as page:
        expect(page.get_by_role("alert")).to_contain_text("unknown, expired or revoked")
        page.evaluate("sessionStorage.setItem('watchstep.token', 'wst_ended')")
        page.goto("about:blank")
        page.goto(f"{site.url}/#token={site.token}")
        expect(page.get_by_role("banner")).to_contain_text("admin")


def test_a_new_tab_is_logged_in(visit: Visit, site: Site) -> None:
    with visit.open("/") as page:
        settled(page)
        other = page.context.new_page()
        other.goto(site.url + site.run_path(site.healthy))
        expect(other.get_by_role("heading", level=1)).to_contain_text(site.healthy)


def test_a_token_that_is_revoked_leads_to_the_login(visit: Visit, site: Site) -> None:
    visit.expect("401")
    with visit.open(f"/projects/{PROJECT}") as page:
        settled(page)
        page.route("**/v1/**", lambda route: route.fulfill(status=401, json={"detail": "revoked"}))
        page.get_by_role("link", name=site.healthy).click()
        expect(page.get_by_role("heading", name="Log in to Watchstep")).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("expired or revoked")


def test_a_service_that_is_gone_is_shown_and_waited_for(visit: Visit, site: Site) -> None:
    visit.expect("ERR_", "Failed to load")
    with visit.open(site.run_path(site.healthy)) as page:
        settled(page)
        page.route("**/v1/**", lambda route: route.abort())
        page.reload()
        expect(page.get_by_role("main")).to_contain_text("The service does not answer")
        page.unroute("**/v1/**")
        expect(page.get_by_role("heading", level=1)).to_contain_text(site.healthy)


def test_a_busy_service_is_asked_again(visit: Visit, site: Site) -> None:
    refused: list[str] = []

    def refuse_once(route: Route) -> None:
        if refused:
            route.continue_()
        else:
            refused.append(route.request.url)
            route.fulfill(status=429, json={"detail": "busy"})

    with visit.open("/") as page:
        settled(page)
        page.route("**/overview*", refuse_once)
        page.goto(site.url + site.run_path(site.healthy))
        expect(page.get_by_role("heading", name="Layers")).to_be_visible()
    assert len(refused) == 1


def test_login_form(visit: Visit, site: Site) -> None:
    visit.expect("401")  # Chromium reports the status of refused requests
    with visit.open(site.run_path(site.faulty), token="") as page:
        page.get_by_label("Token", exact=True).fill("wst_wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown, expired or revoked")
        check_themes(page, "login")
        page.get_by_label("Token", exact=True).fill(site.token)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text(site.faulty)
        assert page.url.endswith(site.faulty)


def test_unknown_addresses_say_so(visit: Visit) -> None:
    for path in ("/projects/demo/nothing", "/nothing"):
        with visit.open(path) as page:
            expect(page.get_by_role("main")).to_contain_text("There is no such page")
    with visit.open("/projects/demo/nothing") as page:
        page.get_by_role("link", name="All projects").click()
        settled(page)


def test_the_theme_can_be_chosen(visit: Visit) -> None:
    with visit.open(f"/projects/{PROJECT}") as page:
        settled(page)
        background = "getComputedStyle(document.documentElement).backgroundColor"
        light = page.evaluate(background)
        page.get_by_label("Theme").select_option("dark")
        assert page.evaluate(background) != light
        page.reload()
        settled(page)
        assert page.evaluate(background) != light


def test_the_policy_forbids_scripts_in_markup(visit: Visit) -> None:
    visit.expect("Trusted", "Content Security Policy")
    with visit.open("/") as page:
        settled(page)
        refused = page.evaluate(
            "() => { try { document.body.innerHTML = '<img src=x onerror=alert(1)>'; return false } catch { return true } }"
        )
        assert refused


def test_three_clicks_lead_from_the_runs_to_the_layer_and_step_that_failed(visit: Visit, site: Site) -> None:
    with visit.open("/") as page:
        page.get_by_role("link", name=site.faulty).click()
        page.get_by_role("link", name="See the evidence").click()
        page.get_by_role("link", name="First bad tensor").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("model:input")
        expect(page).to_have_url(re.compile(r"/tensors/model%3Ainput\?.*step=158"))


def test_the_page_of_a_large_run_opens(browser: Browser, tmp_path: Path) -> None:
    """500 tensors and 1,000 steps; `benchmarks.dashboard` measures how fast one of 10,000 steps does."""
    store = tmp_path / "runs"
    make_run(store, 1000)
    settings = load_settings(store=str(store), home=store / ".watchstep", port=0)
    with EmbeddedService(settings) as service:
        opened = Visit(browser, service.url, service.page_link.partition("#token=")[2])
        with opened.open(f"/projects/{LARGE_PROJECT}/runs/{LARGE_RUN}") as page:
            settled(page)
            expect(page.get_by_role("heading", name="Layers")).to_be_visible()
            expect(page.get_by_role("main")).to_contain_text("model.blocks.0")
            assert serious_findings(page) == []
        opened.check()
