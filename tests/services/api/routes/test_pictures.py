"""The picture of an alert: by a token, or by a signed link that leads to nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from pydantic import SecretStr

from tests.services.api.conftest import Api, Client
from tests.services.driving import Driven
from tests.services.notify.alerting import PUBLIC, fire, picture_name, reachable
from watchstep_services.api.app import create_app
from watchstep_services.core.redaction import redact
from watchstep_services.db.clock import read_clock
from watchstep_services.db.encryption import new_key
from watchstep_services.notify import pictures
from watchstep_services.notify.picture_links import PictureName, picture_link

HOUR_NS = 3600 * 10**9


@pytest.fixture
def pictured(driven_sqlite: Driven, tmp_path: Path) -> Api:
    """A service with one alert, a key and a public URL."""
    driven = reachable(driven_sqlite, tmp_path)
    fire(driven)
    return Api.of(driven)


def link(api: Api, name: PictureName | None = None, ahead_ns: int = 0) -> str:
    """A signed link, without the public URL."""
    with api.driven.service.database.read() as session:
        now = read_clock(session)
    found = picture_link(api.driven.service.settings, name or picture_name(api.driven), now + ahead_ns)
    assert found.startswith(f"{PUBLIC}/v1/")
    return found.removeprefix(PUBLIC)


def changed(address: str, **query: str) -> str:
    parts = urlsplit(address)
    values = {name: value for name, (value,) in parse_qs(parts.query).items()}
    return f"{parts.path}?{urlencode({**values, **query})}"


def assert_refused(answer: httpx.Response, status: int = 401) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.ci
def test_a_link_needs_no_token_and_a_token_needs_no_link(pictured: Api) -> None:
    signed = pictured.client.get(link(pictured))
    assert signed.status_code == 200, signed.text
    assert signed.headers["content-type"] == "image/png"
    assert signed.headers["x-content-type-options"] == "nosniff"
    assert signed.content.startswith(b"\x89PNG\r\n\x1a\n")
    plain = urlsplit(link(pictured)).path
    assert pictured.call("GET", plain, role="viewer").content == signed.content
    assert_refused(pictured.client.get(plain))
    assert_refused(pictured.call("GET", plain, project="text"), 403)
    assert_refused(pictured.call("GET", plain, role="recorder"), 403)
    # A token decides where there is one: a link does not widen it.
    assert_refused(pictured.call("GET", link(pictured), project="text"), 403)


def test_a_link_leads_to_one_picture_and_for_a_limited_time(pictured: Api) -> None:
    address = link(pictured)
    name = picture_name(pictured.driven)
    expires = int(parse_qs(urlsplit(address).query)["expires"][0])
    for other in (
        changed(address, expires=str(expires + 1)),
        changed(address, signature="A" * 43),
        changed(address, signature=""),
        changed(address, expires="x"),
        changed(address, expires="9" * 30),
        address.replace("expires", "expire"),
        address.replace(name.fingerprint, "0" * 32),
        address.replace("run-1", "run-2"),
        address.replace("vision", "text"),
        link(pictured, ahead_ns=-169 * HOUR_NS),
        link(pictured, PictureName("vision", "run-1", "0" * 32)).replace("0" * 32, name.fingerprint),
    ):
        assert_refused(pictured.client.get(other))
    query = urlsplit(address).query
    run = "/v1/projects/vision/runs/run-1"
    for path in (
        run,
        f"{run}/alerts",
        f"{run}/alerts/{name.fingerprint}",
        f"{run}/alerts/{name.fingerprint}/acknowledgement",
    ):
        assert_refused(pictured.client.get(f"{path}?{query}"), 401)


@pytest.mark.ci
def test_links_of_an_earlier_key_are_valid_until_it_is_removed(pictured: Api) -> None:
    address = link(pictured)
    settings = pictured.driven.service.settings
    assert settings.secret_key is not None
    later = new_key()
    for key, status in ((f"{later},{settings.secret_key.get_secret_value()}", 200), (later, 401)):
        service = replace(
            pictured.driven.service,
            settings=settings.model_copy(
                update={"secret_key": SecretStr(key), "database_url": SecretStr("x")}
            ),
        )
        assert Client(create_app(service)).get(address).status_code == status


def test_requests_by_links_are_counted_by_address(driven_sqlite: Driven, tmp_path: Path) -> None:
    driven = reachable(driven_sqlite, tmp_path, failures_per_minute=5)
    fire(driven)
    api = Api.of(driven)
    answers = [api.client.get(link(api)).status_code for _ in range(8)]
    assert answers[:5] == [200] * 5
    assert 429 in answers


def test_what_has_no_picture_is_not_found(pictured: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    path = urlsplit(link(pictured)).path
    name = picture_name(pictured.driven)
    for other in (path.replace(name.fingerprint, "0" * 32), path.replace("run-1", "run-9")):
        assert_refused(pictured.call("GET", other), 404)
    assert_refused(pictured.call("GET", path.replace(name.fingerprint, "x")), 422)
    monkeypatch.setattr("watchstep_services.api.routes.pictures.can_draw", lambda: False)
    missing = pictured.call("GET", path)
    assert_refused(missing, 404)
    assert "plots" in missing.json()["hint"]


def test_the_signature_is_not_logged(pictured: Api) -> None:
    address = link(pictured)
    signature = parse_qs(urlsplit(address).query)["signature"][0]
    assert signature not in redact(f"GET {address} HTTP/1.1 200")


@pytest.mark.ci
def test_matplotlib_is_found_without_importing_it() -> None:
    import subprocess
    import sys

    program = (
        "import sys; from watchstep_services.dispatch import dispatch; from watchstep_services.notify import pictures;"
        "assert pictures.can_draw(); assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert pictures.can_draw()
