"""The page about rules: the list with health, the editor, adding a rule, and backtests with a slider over the values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.web.site import PROJECT, Site, Visit, check_themes, screenshot, serious_findings, settled
from watchstep_services.auth import create_token

RULES = f"/projects/{PROJECT}/rules"
HOSTILE = "<img src=x onerror=alert(1)> \u202eabc " + "w" * 90


@pytest.fixture
def api(site: Site) -> Iterator[httpx.Client]:
    """A client of the service; the project's rules are removed afterwards."""
    with httpx.Client(base_url=site.url, headers={"authorization": f"Bearer {site.token}"}) as client:
        yield client
        for rule in client.get(f"/v1{RULES}").json()["rules"]:
            client.delete(f"/v1{RULES}/{quote(rule['name'], safe='')}").raise_for_status()


def put(api: httpx.Client, name: str, **config: Any) -> None:
    api.put(f"/v1{RULES}/{quote(name, safe='')}", json=config).raise_for_status()


def text_of(page: Page) -> Any:
    return page.get_by_label("As text")


def test_the_list(visit: Visit) -> None:
    with visit.open(RULES) as page:
        settled(page)
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name="nan_or_inf", exact=True))
        for text in ("critical", "stops the job", "owner", "ok on 2"):
            expect(row).to_contain_text(text)
        check_themes(page, "rules")


def test_the_address_holds_the_filters(visit: Visit) -> None:
    with visit.open(RULES) as page:
        page.get_by_role("button", name="without data").click()
        expect(page.get_by_role("link", name="overfit", exact=True)).to_have_count(0)
        page.get_by_placeholder("Search in these rules").fill("batch norm")
        expect(page.get_by_role("row")).to_have_count(2)
        page.reload()
        settled(page)
        expect(page.get_by_role("button", name="without data")).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_placeholder("Search in these rules")).to_have_value("batch norm")
        page.get_by_role("link", name="frozen_batch_norm", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("frozen_batch_norm")
        expect(page.get_by_role("region", name="On the newest 2 runs")).to_contain_text("no data")


def test_an_owners_rule_is_read_only_until_it_is_replaced(visit: Visit, api: httpx.Client) -> None:
    with visit.open(f"{RULES}?rule=vanishing_gradient") as page:
        settled(page)
        settings = page.get_by_role("region", name="Settings")
        expect(settings).to_contain_text("one of the default rules")
        expect(settings).to_contain_text("Mean magnitude of the non-zero elements")
        expect(settings.get_by_role("textbox")).to_have_count(0)
        expect(page.get_by_role("region", name="What it means")).to_contain_text("Sigmoids or tanhs")
        page.get_by_role("button", name="Replace it in this project").click()
        page.get_by_label("threshold", exact=True).fill("1e-5")
        expect(text_of(page)).to_have_value(re.compile("threshold: 0.00001"))
        page.get_by_role("button", name="Save the new rule").click()
        expect(page.get_by_text("Saved. Runs that are registered from now on")).to_be_visible()
        expect(page.get_by_role("main")).to_contain_text("replaces the owner's")
        saved = api.get(f"/v1{RULES}/vanishing_gradient").json()["config"]
        assert saved["params"] == {"threshold": 1e-5}
        assert saved["for"]["steps"] == 3


def test_a_rule_is_found_by_a_symptom_and_added(visit: Visit, api: httpx.Client) -> None:
    with visit.open(RULES) as page:
        page.get_by_role("link", name="Add a rule").click()
        page.get_by_label("What do you want to be told about?").fill("gpu memory")
        page.get_by_role("link", name="gpu_memory_increase", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("New rule: gpu_memory_increase")
        page.get_by_label("Name").fill("leak")
        page.get_by_label("Severity").select_option("critical")
        page.get_by_label("Stop the job").check()
        page.get_by_label("For at least").fill("4")
        expect(text_of(page)).to_have_value(
            "rule: gpu_memory_increase\nfor:\n  steps: 4\nseverity: critical\nactions: [stop]\n"
        )
        page.get_by_role("button", name="Save the new rule").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("leak")
        expect(page).to_have_url(re.compile(r"rules\?rule=leak$"))
        page.get_by_role("button", name="Remove…").click()
        page.get_by_role("button", name="Yes, remove").click()
        expect(page.get_by_text("Removed leak for new runs")).to_be_visible()
        assert api.get(f"/v1{RULES}").json()["rules"] == []


def test_form_and_text_follow_each_other_and_are_checked(visit: Visit, api: httpx.Client) -> None:
    put(api, "mine", rule="overfit", params={"patience": 3})
    with visit.open(f"{RULES}?rule=mine") as page:
        patience = page.get_by_label("patience", exact=True)
        expect(patience).to_have_value("3")
        patience.fill("0")
        expect(page.get_by_role("region", name="Settings")).to_contain_text("greater than or equal to 1")
        expect(patience).to_have_attribute("aria-invalid", "true")
        expect(page.get_by_role("button", name="Save", exact=True)).to_be_disabled()
        assert serious_findings(page) == []
        text_of(page).fill("rule: overfit\nparams: {patience: 7, rise: 0.")
        expect(page.get_by_text("The text cannot be shown as a form.")).to_be_visible()
        text_of(page).fill("rule: overfit\nparams: {patience: 7, rise: 0.5}\n")
        expect(patience).to_have_value("7")
        expect(page).to_have_url(re.compile("draft="))
        page.reload()
        expect(patience).to_have_value("7")
        expect(page.get_by_label("rise", exact=True)).to_have_value("0.5")
        page.get_by_role("button", name="Discard changes").click()
        expect(patience).to_have_value("3")
        expect(page).not_to_have_url(re.compile("draft="))


def test_a_concurrent_change_is_not_overwritten(visit: Visit, api: httpx.Client) -> None:
    visit.expect("412")
    put(api, "mine", rule="overfit", params={"patience": 3})
    with visit.open(f"{RULES}?rule=mine") as page:
        page.get_by_label("patience", exact=True).fill("8")
        put(api, "mine", rule="overfit", params={"patience": 4})
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.get_by_role("alert").filter(has_text="Somebody changed this rule")).to_contain_text(
            "patience: 4"
        )
        assert api.get(f"/v1{RULES}/mine").json()["config"]["params"] == {"patience": 4}
        page.get_by_role("button", name="Replace theirs by mine").click()
        expect(page.get_by_text("Saved. Runs that are registered")).to_be_visible()
        assert api.get(f"/v1{RULES}/mine").json()["config"]["params"] == {"patience": 8}
        expect(page.get_by_role("button", name="Save", exact=True)).to_be_disabled()  # nothing is changed now


def test_a_backtest_shows_which_value_would_have_alerted(visit: Visit, site: Site) -> None:
    with visit.open(f"{RULES}?new=exploding_gradient") as page:
        page.get_by_label("Vary").select_option("growth")
        page.get_by_label("from", exact=True).fill(
            "1.01"
        )  # which steps are recorded depends on time; at this value some always alert
        page.get_by_label("to", exact=True).fill("500")
        page.get_by_label("in values").fill("7")
        page.get_by_role("button", name="Run on 2 runs").click()
        slider = page.get_by_role("slider", name="Value of growth")
        expect(slider).to_be_visible()
        result = page.get_by_role("region", name="Try it on finished runs")
        expect(result).to_contain_text("growth = 100 (now)")
        slider.press("Home")
        expect(result).to_contain_text("growth = 1.01")
        row = result.get_by_role("row").filter(has=page.get_by_role("link", name=site.healthy))
        expect(row).to_contain_text("alert")
        expect(row.get_by_role("link", name=re.compile("gradient"))).to_be_visible()
        check_themes(page, "rules-backtest")
        page.reload()
        expect(result).to_contain_text("growth = 1.01")
        expect(row).to_contain_text("alert")
        slider.press("ArrowRight")
        value = page.get_by_role("status").filter(has_text="growth =").locator("strong").inner_text()
        page.get_by_role("button", name="Use this value").click()
        expect(page.get_by_label("growth", exact=True)).to_have_value(value)
        expect(text_of(page)).to_have_value(re.compile(f"growth: {re.escape(value)}"))
        page.get_by_label("window", exact=True).fill("30")
        expect(result).to_contain_text("The settings have changed since this backtest")


def test_an_owners_rule_is_tried_and_a_value_taken_over(visit: Visit, site: Site) -> None:
    with visit.open(f"{RULES}?rule=nan_or_inf&from=1&to=300&values=4") as page:
        page.get_by_label(site.healthy).uncheck()
        page.get_by_role("button", name="Run on 1 run").click()
        result = page.get_by_role("region", name="Try it on finished runs")
        expect(result).to_contain_text("alerts on 1 of 1 run with a fault")
        page.get_by_role("slider").press("Home")
        page.get_by_role("button", name="Use this value").click()
        expect(page.get_by_label("steps_without_update", exact=True)).to_have_value("1")
        expect(page).to_have_url(re.compile("replace=1.*draft="))


def test_an_alert_that_another_rule_explains_is_named(visit: Visit, site: Site) -> None:
    with visit.open(f"{RULES}?rule=non_finite_values&vary=for&from=1&to=4&runs={site.faulty}") as page:
        page.get_by_role("button", name="Run on 1 run").click()
        result = page.get_by_role("region", name="Try it on finished runs")
        expect(result.get_by_role("row").filter(has_text=site.faulty)).to_contain_text(
            "explained by nan_or_inf"
        )


def test_a_viewer_reads(visit: Visit, site: Site) -> None:
    token = create_token(site.service.database, "viewer", PROJECT)
    with visit.open(RULES, token=token) as page:
        settled(page)
        expect(page.get_by_role("link", name="Add a rule")).to_have_count(0)
        page.get_by_role("link", name="overfit", exact=True).click()
        expect(page.get_by_role("main")).to_contain_text("Backtests need a token that may operate")
        expect(page.get_by_role("button", name="Replace it in this project")).to_have_count(0)
        expect(page.get_by_role("region", name="What it means")).to_be_visible()


def test_names_are_text_and_a_narrow_screen_does_not_scroll(visit: Visit, api: httpx.Client) -> None:
    put(api, HOSTILE, rule="overfit", labels={"team": HOSTILE}, message=HOSTILE)
    with visit.open(RULES, width=360, height=700) as page:
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert serious_findings(page) == []
        page.get_by_role("link", name="<img src=x").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("<img src=x onerror=alert(1)>")
        expect(page.get_by_text("✓ Valid")).to_be_visible()
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert serious_findings(page) == []
        screenshot(page, "rules-narrow")


def test_what_does_not_exist_says_so(visit: Visit, site: Site) -> None:
    visit.expect("404", "403")
    with visit.open(f"{RULES}?rule=nothing") as page:
        expect(page.get_by_role("main")).to_contain_text("The project has no rule of this name")
    with visit.open(f"{RULES}?new=nothing") as page:
        expect(page.get_by_role("main")).to_contain_text("nothing")
        settled(page)
    with visit.open(f"{RULES}?rule=overfit&backtest=999999") as page:
        expect(page.get_by_role("main")).to_contain_text("backtest 999999 of demo: not found")
    token = create_token(site.service.database, "viewer", "another-project")
    with visit.open(RULES, token=token) as page:
        expect(page.get_by_role("main")).to_contain_text("may not read the rules")
