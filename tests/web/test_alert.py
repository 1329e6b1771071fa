"""The page of an alert: what fired, the evidence, and what a person does about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.web.site import (
    PROJECT,
    Site,
    Visit,
    changed_answers,
    check_themes,
    screenshot,
    serious_findings,
    settled,
)
from watchstep_services.auth import create_token
from watchstep_services.db.models import AlertInstanceRow, RunRow

HOSTILE = "<img src=x onerror=alert(1)>\u202e\n" + "x" * 4000


@pytest.fixture(scope="module")
def fingerprints(site: Site) -> dict[str, str]:
    """Fingerprints of the faulty run's alerts, by the names of their rules."""
    with site.service.database.read() as session:
        rows = session.query(AlertInstanceRow).join(RunRow, RunRow.id == AlertInstanceRow.run_id)
        return {row.name: row.fingerprint for row in rows.filter(RunRow.run == site.faulty)}


@pytest.fixture
def path(site: Site, fingerprints: dict[str, str]) -> str:
    """Path of the page about the alert that stopped the run."""
    return f"{site.run_path(site.faulty)}/alerts/{fingerprints['nan_or_inf']}"


@pytest.fixture
def undisturbed(site: Site, fingerprints: dict[str, str]) -> Iterator[None]:
    """Ends what a test did to the alert."""
    yield
    with site.service.database.write() as session:
        for row in session.query(AlertInstanceRow):
            row.acknowledged_by, row.acknowledged_ns, row.acknowledgement = "", None, ""


def card(page: Page, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def test_the_page_answers_what_where_and_what_to_do(visit: Visit, site: Site, path: str) -> None:
    with visit.open(path) as page:
        settled(page)
        expect(page.get_by_role("heading", level=1)).to_have_text("nan_or_inf")
        sentence = page.locator("#fired")
        expect(sentence).to_contain_text(
            re.compile(
                r"Bad from step \d+: \d+ NaN among \d+ elements of \S+:gradient, .*\.\s+The alert stopped the run; it ended after step "
                r"\d+, \d+ steps? lost\."
            )
        )
        expect(page.get_by_text("Check first:")).to_be_visible()
        expect(card(page, "Evidence")).to_contain_text("what the rule compares")
        expect(card(page, "Evidence")).to_contain_text("threshold")
        expect(card(page, "Evidence")).to_contain_text("Not finite at steps")
        expect(card(page, "Layers").get_by_role("listitem").first).to_contain_text("model:input")
        expect(card(page, "Just before")).to_contain_text("before")
        expect(card(page, "Actions")).to_contain_text("Stop the job")
        expect(card(page, "Actions").get_by_role("listitem")).to_have_count(2)
        expect(card(page, "What to do")).to_contain_text("Usual causes")
        expect(card(page, "Commands")).to_contain_text("watchstep replay")
        expect(card(page, "Other alerts of the run")).to_contain_text("non_finite_values")
        check_themes(page, "alert")


def test_the_first_bad_tensor_is_one_click_away(visit: Visit, path: str) -> None:
    with visit.open(path) as page:
        page.get_by_role("link", name="First bad tensor").click()
        expect(page).to_have_url(re.compile(r"/tensors/model%3Ainput\?step=\d+"))


def test_an_inhibited_alert_leads_to_its_cause(
    visit: Visit, site: Site, path: str, fingerprints: dict[str, str]
) -> None:
    with visit.open(f"{site.run_path(site.faulty)}/alerts/{fingerprints['non_finite_values']}") as page:
        expect(card(page, "Actions")).to_contain_text("nan_or_inf explains this alert")
        page.get_by_text("This alert follows from").get_by_role("link", name="nan_or_inf").click()
        expect(page).to_have_url(re.compile(re.escape(path)))
        expect(page.get_by_role("heading", level=1)).to_have_text("nan_or_inf")


def test_the_address_holds_the_view_of_the_evidence(visit: Visit, path: str) -> None:
    with visit.open(path) as page:
        settled(page)
        page.get_by_label("Steps before").select_option("50")
        page.get_by_label("Log scale").check()
        expect(page).to_have_url(re.compile("before=50&log=1"))
        settled(page)
        box = page.get_by_role("img").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 300, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 60, steps=3)
        page.mouse.up()
        expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
        page.reload()
        settled(page)
        expect(page.get_by_label("Steps before")).to_have_value("50")
        expect(page.get_by_label("Log scale")).to_be_checked()
        page.get_by_role("button", name="Show all steps").click()
        expect(page).not_to_have_url(re.compile("from="))


@pytest.mark.usefixtures("undisturbed")
def test_acknowledging_with_the_keyboard_and_withdrawing(visit: Visit, path: str) -> None:
    with visit.open(path) as page:
        page.get_by_role("button", name="Acknowledge", exact=True).press("Enter")
        expect(page).to_have_url(re.compile("form=acknowledge"))
        expect(page.get_by_label("Comment")).to_be_focused()
        page.keyboard.type("<b>looking</b> at the loader")
        page.keyboard.press("Enter")
        expect(page.get_by_text("<b>looking</b> at the loader")).to_be_visible()
        expect(page).not_to_have_url(re.compile("form="))
        expect(page.get_by_role("button", name="Change the acknowledgement")).to_be_visible()
        page.get_by_role("button", name="Withdraw").click()
        expect(page.get_by_text("looking")).to_have_count(0)


def test_silencing_shows_what_is_covered(visit: Visit, site: Site, path: str) -> None:
    visit.expect("422")  # of the preview of a matcher that is not one
    with visit.open(f"{path}?form=silence") as page:
        form = page.locator("form")
        expect(form).to_contain_text("1 alert that fires now is covered")
        form.get_by_label("name nan_or_inf", exact=True).uncheck()
        expect(form).to_contain_text("2 alerts that fire now are covered")
        form.get_by_label("More matchers, one per line").fill("nonsense")
        form.get_by_label("More matchers, one per line").blur()
        expect(form).to_contain_text("is not a matcher")
        form.get_by_label("More matchers, one per line").fill('severity!="info"')
        form.get_by_label("More matchers, one per line").blur()
        expect(form).to_contain_text("2 alerts that fire now are covered")
        assert serious_findings(page) == []
        form.get_by_label("Duration").select_option("4 hours")
        form.get_by_label("Reason, for people who wonder").fill("known")
        form.get_by_role("button", name="Silence for 4 hours").click()
        expect(page.get_by_text("Silenced until")).to_contain_text("known")
        page.get_by_role("button", name="End the silence").click()
        expect(page.get_by_text("Silenced until")).to_have_count(0)


def test_the_link_and_the_commands_are_copied(visit: Visit, path: str) -> None:
    with visit.open(f"{path}?log=1") as page:
        settled(page)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy the link").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == visit.url + path + "?log=1"
        page.get_by_role("button", name=re.compile("Copy: Compute step")).click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert "watchstep replay" in page.evaluate("navigator.clipboard.readText()")


def test_a_phone_shows_the_sentence_and_the_controls_first(visit: Visit, path: str) -> None:
    with visit.open(path, width=360, height=780) as page:
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        expect(page.get_by_role("button", name="Acknowledge", exact=True)).to_be_in_viewport()
        assert serious_findings(page) == []
        screenshot(page, "alert-narrow")


def test_a_viewer_has_no_controls(visit: Visit, site: Site, path: str) -> None:
    token = create_token(site.service.database, "viewer", PROJECT)
    with visit.open(f"{path}?form=silence", token=token) as page:
        expect(page.get_by_text("Your token may only read")).to_be_visible()
        expect(page.get_by_role("button", name="Silence")).to_have_count(0)
        expect(page.locator("form")).to_have_count(0)


def test_an_alert_that_does_not_exist_says_so(visit: Visit, site: Site) -> None:
    visit.expect("404")
    with visit.open(f"{site.run_path(site.faulty)}/alerts/{'0' * 32}") as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("Alert")
        expect(page.get_by_role("main")).to_contain_text("not found")


def test_hostile_names_and_a_rule_that_could_not_compare_anything(visit: Visit, path: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["finding"].update(tensor=HOSTILE, module=HOSTILE, upstream=[HOSTILE + "y"])
        document["alert"]["message"] = document["run"]["reason"] = HOSTILE
        document["before"][0]["title"] = HOSTILE
        document["commands"][0]["text"] = HOSTILE
        document["series"].update(lines=[], findings=[])
        document["deviations"].update(deviations=[], problem="the store does not answer")
        document["others"][0]["name"] = HOSTILE

    with visit.open(f"/projects/{PROJECT}", width=360, height=780) as page:
        changed_answers(page, "**/page", change)
        page.goto(visit.url + path)
        settled(page)
        expect(page.locator("section.fired")).to_contain_text("<img src=x onerror=alert(1)>")
        expect(card(page, "Evidence")).to_contain_text(
            "The statistics cannot be read: the store does not answer."
        )
        expect(card(page, "Layers")).to_contain_text("Nothing was compared: the store does not answer.")
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert serious_findings(page) == []


def test_a_person_says_whether_the_alert_was_right(visit: Visit, site: Site) -> None:
    with visit.open(site.run_path(site.faulty)) as page:
        page.get_by_role("link", name="See the evidence").click()
        group = page.get_by_role("group", name="Was this alert right?")
        group.get_by_role("button", name="Yes").click()
        expect(group.get_by_role("button", name="Yes")).to_have_attribute("aria-pressed", "true")
        page.reload()
        expect(group.get_by_role("button", name="Yes")).to_have_attribute("aria-pressed", "true")
        assert serious_findings(page) == []
        group.get_by_role("button", name="Yes").click()
        expect(group.get_by_role("button", name="Yes")).to_have_attribute("aria-pressed", "false")
