"""Valid tokens are cached for seconds only."""

from __future__ import annotations

import json

from tests.services.api.conftest import Api
from tests.services.api.walking import ask
from watchstep.capture.service.client import MOST_SEGMENTS
from watchstep_services.api.middleware.access import CACHE_SECONDS, TokenCache
from watchstep_services.auth import AuthenticatedCaller, create_token, id_of, revoke

RUN = "/v1/projects/vision/runs"
FIRST = {"node": "n", "writer": "w", "seq": 0, "first": 0, "last": 3}
SEGMENT = {"attempt": "a1", "segments": [FIRST]}
WHO = AuthenticatedCaller("recorder", "vision", "0123456789abcdef")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_entry_expires_or_is_discarded() -> None:
    clock = Clock()
    cache = TokenCache(clock)
    assert cache.get("good") is None
    cache.put("good", WHO, clock())
    assert cache.get("good") == WHO
    assert cache.get("goo") is None
    clock.now += CACHE_SECONDS
    assert cache.get("good") is None
    cache.put("good", WHO, clock())
    cache.discard("another")
    assert cache.get("good") == WHO
    cache.discard(WHO.token)
    assert cache.get("good") is None


def test_the_cache_has_a_limited_size() -> None:
    cache = TokenCache(Clock())
    for number in range(11_000):
        cache.put(f"token {number}", WHO, cache.now())
    assert cache.get("token 999") is None
    assert cache.get("token 10999") == WHO


def test_a_token_revoked_by_another_process_is_refused_soon(api: Api) -> None:
    clock = Clock()
    api.client.app.state.token_cache._clock = clock
    token = create_token(api.driven.service.database, "recorder")
    assert ask(api.client.app, "POST", RUN, token, {"run": "run-1"}).status == 200
    revoke(api.driven.service.database, id_of(token), None, "somebody else")
    clock.now += CACHE_SECONDS
    assert ask(api.client.app, "POST", RUN, token, {"run": "run-1"}).status == 401


def test_an_invalid_announcement_gets_the_usual_error(api: Api) -> None:
    api.call("POST", RUN, {"run": "run-1"}, role="recorder")
    path = f"{RUN}/run-1/announcements"
    good = api.call("POST", path, SEGMENT, role="recorder")
    assert (good.status_code, good.headers["content-type"]) == (200, "application/json")
    assert good.json()["pause_seconds"] == 0.0
    for body, word in (
        ({**SEGMENT, "segments": [{**FIRST, "seq": -1}]}, "seq"),
        ([], "body"),
        ({**SEGMENT, "segments": [{**FIRST, "last": -1}]}, "last"),
        ({**SEGMENT, "segments": []}, "segments"),
        ({**SEGMENT, "segments": [FIRST] * (MOST_SEGMENTS + 1)}, "segments"),
        (None, "body"),
    ):
        bad = api.call("POST", path, body, role="recorder")
        assert bad.status_code == 422, body
        assert word in bad.json()["detail"]
    assert api.call("POST", f"{RUN}/run-2/announcements", SEGMENT, role="recorder").status_code == 404
    assert api.call("POST", path, SEGMENT, role="viewer").status_code == 403
    assert (
        api.call("POST", path, {**SEGMENT, "segments": [{**FIRST, "first": 4}]}, role="recorder").status_code
        == 422
    )
    token = api.token("recorder")
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    assert api.client.request("POST", path, content="{", headers=headers).status_code == 422
    headers["content-type"] = "text/plain"
    assert api.client.request("POST", path, content=json.dumps(SEGMENT), headers=headers).status_code == 422
