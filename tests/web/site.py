"""A service with recorded runs, and pages of Chromium that look at it. Fixtures are in `conftest.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, Route, expect

from watchstep_services.demo.trainings import Demo, DemoWatcher, launch_both, watch_until_settled
from watchstep_services.serve.embedded import EmbeddedService

ROOT = Path(__file__).parents[2]
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
SCREENSHOTS = ROOT / "reports" / "screenshots"
PROJECT = "demo"

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser; None if there is none."""

CHROMIUM_ARGUMENTS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)


@dataclass(frozen=True)
class Site:
    """A running service with the demo's two runs: digits with a healthy and with a faulty training.

    Attributes:
        service: the service.
        healthy: name of the run that completed.
        faulty: name of the run that a rule stopped.
        store: folder of the store.
    """

    service: EmbeddedService
    healthy: str
    faulty: str
    store: Path

    @property
    def url(self) -> str:
        """Address of the page."""
        return self.service.url

    @property
    def token(self) -> str:
        """A token of an administrator."""
        return self.service.page_link.partition("#token=")[2]

    def run_path(self, run: str) -> str:
        """Path of a run's page."""
        return f"/projects/{PROJECT}/runs/{run}"


def record_demo(service: EmbeddedService, folder: Path) -> tuple[str, str]:
    """Record the demo's trainings, wait for their end, and return the names of the healthy and of the faulty run."""
    runs = launch_both(Demo(folder, 0, explains=False), service)
    watcher = DemoWatcher(service, runs)
    try:
        watch_until_settled(service, watcher, lambda: None)
    finally:
        watcher.close()
    return runs[0].run_id, runs[1].run_id


@dataclass
class Visit:
    """Pages that a test opens, and what went wrong in them.

    Attributes:
        browser: the browser.
        url: address of the service.
        token: token that logs in; empty to see the login form.
        errors: messages on the console and uncaught exceptions.
        foreign: requests to other origins.
    """

    browser: Browser
    url: str
    token: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    @contextmanager
    def open(
        self, path: str, *, dark: bool = False, width: int = 1280, height: int = 900, token: str | None = None
    ) -> Iterator[Page]:
        """Open a path of the page, logged in, in a new browser context.

        Args:
            path: path and query string.
            dark: whether the system's setting is the dark theme.
            width: of the window, in pixels.
            height: of the window, in pixels.
            token: another token than the site's; empty for none.
        """
        context = self.browser.new_context(
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": height},
            reduced_motion="reduce",
            locale="en-US",
            timezone_id="UTC",
        )
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._check_origin)
        value = self.token if token is None else token
        page.goto(self.url + path + (f"#token={value}" if value else ""))
        try:
            yield page
        finally:
            context.close()

    def expect(self, *errors: str) -> None:
        """Allow console messages that contain these texts, such as the 404 of a missing run."""
        self.expected += errors

    def check(self) -> None:
        """Assert that no page reported an error or requested anything from elsewhere."""
        # A busy service refuses requests, and the page repeats them; Chromium reports each refusal.
        expected = (*self.expected, "status of 429")
        unexpected = [error for error in self.errors if not any(text in error for text in expected)]
        assert not unexpected, unexpected
        assert not self.foreign, self.foreign

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.errors.append(message.text)

    def _check_origin(self, request: Request) -> None:
        if not request.url.startswith((self.url, "blob:", "data:")):
            self.foreign.append(request.url)


def settled(page: Page) -> None:
    """Wait until nothing of the page is loading. (Playwright's `wait_for_function` needs `eval`, which the page's policy forbids.)"""
    expect(
        page.get_by_role("main")
        .get_by_role("heading")
        .or_(page.get_by_role("main").locator(".message"))
        .first
    ).to_be_visible()
    expect(page.locator("html[data-loading]")).to_have_count(0)
    expect(page.locator("[aria-busy=true]")).to_have_count(0)


def serious_findings(page: Page) -> list[str]:
    """Return the serious and critical findings of axe, an accessibility checker."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    result: dict[str, Any] = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{finding['id']}: {finding['help']}: {[node['target'] for node in finding['nodes']][:5]}"
        for finding in result["violations"]
        if finding["impact"] in {"serious", "critical"}
    ]


def check_themes(page: Page, name: str) -> None:
    """Assert that axe finds nothing serious in either theme, and write pictures of both."""
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert not serious_findings(page), theme
        screenshot(page, f"{name}-{theme}")


def screenshot(page: Page, name: str) -> Path:
    """Write a picture of the whole page to ``reports/screenshots``, where a person can look at it."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path


def query(page: Page) -> dict[str, str]:
    """Return the view state in the address."""
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def shown(page: Page) -> None:
    """Wait until the page of a run or a tensor shows what happened, and its pictures."""
    expect(page.locator("#verdict")).to_be_visible()
    settled(page)


def drag(page: Page, target: Locator, begin: float, end: float) -> None:
    """Drag over a part of an element, as shares of its width."""
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], middle, steps=4)
    page.mouse.up()


def is_wider_than_window(page: Page) -> bool:
    """Whether the page scrolls sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def changed_answers(page: Page, address: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the documents of an address of the service on their way to the page."""

    def changed(route: Route) -> None:
        answer = route.fetch()
        document = answer.json()
        change(document)
        route.fulfill(response=answer, json=document)

    page.route(address, changed)
