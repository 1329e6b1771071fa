"""Tokens are remembered for seconds, and no longer."""

from __future__ import annotations

import json

from tests.services.api.conftest import Api
from tests.services.api.walking import ask
from watchstep_services.api.middleware.access import KEPT_SECONDS, KnownTokens
from watchstep_services.auth.token_register import revoke
from watchstep_services.auth.tokens import AuthenticatedCaller, create_token, id_of

RUN = "/v1/projects/vision/runs"
SAID = {"attempt": "a1", "node": "n", "writer": "w", "seq": 0, "first": 0, "last": 3}
WHO = AuthenticatedCaller("recorder", "vision", "0123456789abcdef")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_forgotten_in_time_or_when_it_is_told() -> None:
    clock = Clock()
    known = KnownTokens(clock)
    assert known.find("good") is None
    known.keep("good", WHO, clock())
    assert known.find("good") == WHO
    assert known.find("goo") is None
    clock.now += KEPT_SECONDS
    assert known.find("good") is None
    known.keep("good", WHO, clock())
    known.forget("another")
    assert known.find("good") == WHO
    known.forget(WHO.token)
    assert known.find("good") is None


def test_no_more_are_remembered_than_fit() -> None:
    known = KnownTokens(Clock())
    for number in range(11_000):
        known.keep(f"token {number}", WHO, known.now())
    assert known.find("token 999") is None
    assert known.find("token 10999") == WHO


def test_one_that_was_revoked_by_another_process_is_refused_soon(api: Api) -> None:
    clock = Clock()
    api.client.app.state.known_tokens._clock = clock
    token = create_token(api.driven.service.database, "recorder")
    assert ask(api.client.app, "POST", RUN, token, {"run": "run-1"}).status == 200
    revoke(api.driven.service.database, id_of(token), None, "somebody else")
    clock.now += KEPT_SECONDS
    assert ask(api.client.app, "POST", RUN, token, {"run": "run-1"}).status == 401


def test_an_announcement_that_is_wrong_is_answered_like_any_other(api: Api) -> None:
    api.call("POST", RUN, {"run": "run-1"}, role="recorder")
    path = f"{RUN}/run-1/announcements"
    good = api.call("POST", path, SAID, role="recorder")
    assert (good.status_code, good.headers["content-type"]) == (200, "application/json")
    assert good.json()["pause_seconds"] == 0.0
    for body, word in (
        ({**SAID, "seq": -1}, "seq"),
        ([], "body"),
        ({**SAID, "last": -1}, "last"),
        (None, "body"),
    ):
        bad = api.call("POST", path, body, role="recorder")
        assert bad.status_code == 422, body
        assert word in bad.json()["detail"]
    assert api.call("POST", f"{RUN}/run-2/announcements", SAID, role="recorder").status_code == 404
    assert api.call("POST", path, SAID, role="viewer").status_code == 403
    assert api.call("POST", path, {**SAID, "first": 4}, role="recorder").status_code == 422
    token = api.token("recorder")
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    assert api.client.request("POST", path, content="{", headers=headers).status_code == 422
    headers["content-type"] = "text/plain"
    assert api.client.request("POST", path, content=json.dumps(SAID), headers=headers).status_code == 422
