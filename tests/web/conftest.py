"""Fixtures of the browser tests: one service with recorded runs, and one Chromium, for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.web.site import CHROMIUM, CHROMIUM_ARGUMENTS, Site, Visit, record_demo
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

# Milliseconds: the machine may be busy with other suites.
expect.set_options(timeout=30_000)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service with the demo's two runs."""
    folder = tmp_path_factory.mktemp("demo")
    store = folder / "runs"
    settings = load_settings(store=str(store), home=store / ".watchstep", port=0, sweep_seconds=0.5)
    with EmbeddedService(settings) as service:
        healthy, faulty = record_demo(service, folder)
        yield Site(service, healthy, faulty, store)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    if CHROMIUM is None:
        pytest.skip("NO CHROMIUM HERE: the web page is not proven by this run (apt-get install chromium)")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=[*CHROMIUM_ARGUMENTS])
        yield launched
        launched.close()


@pytest.fixture
def visit(site: Site, browser: Browser) -> Iterator[Visit]:
    """Opens pages of the site; the test fails if one reports an error on its console or requests anything from elsewhere."""
    opened = Visit(browser, site.url, site.token)
    yield opened
    opened.check()
