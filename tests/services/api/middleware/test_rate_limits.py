"""Rate limits, which never affect the data of a recorder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from limits.storage import MemoryStorage, Storage

from tests.services.api.conftest import Api
from tests.services.api.walking import Answer, ask
from tests.services.redis import free_port, running_redis
from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.rate_limits import RateLimits, TooOftenError, redis_storage
from watchstep_services.auth import AuthenticatedCaller, id_of
from watchstep_services.core.settings import load_settings
from watchstep_services.core.telemetry import metrics

RUNS = "/v1/projects/vision/runs"
HERE, THERE = "192.0.2.1", "192.0.2.2"


@dataclass
class Clock:
    """Seconds that pass when the test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_redis() as broker:
        yield broker.url


@pytest.fixture(params=["memory", "redis"])
def storage(request: pytest.FixtureRequest) -> Storage:
    if request.param == "memory":
        return MemoryStorage(wrap_exceptions=True)
    found = redis_storage(request.getfixturevalue("redis_url"))
    found.reset()
    return found


def limits(storage: Storage, clock: Clock | None = None, **changes: int) -> RateLimits:
    values = {"requests_per_minute": 5, "recordings_per_minute": 8, "failures_per_minute": 3, **changes}
    return RateLimits(load_settings(**values), storage, clock or Clock())


def identity(token: str = "a" * 16) -> AuthenticatedCaller:
    return AuthenticatedCaller("operator", None, token)


def refused(ask_once: Any, most: int) -> TooOftenError:
    """The refusal after so many that went through; a second more may be allowed where a window slid meanwhile."""
    for number in range(3 * most):
        try:
            ask_once()
        except TooOftenError as error:
            assert number >= most
            return error
    raise AssertionError("never refused")


def test_each_token_has_its_own_limit(storage: Storage) -> None:
    rate_limits = limits(storage)
    error = refused(lambda: rate_limits.take(identity(), "read"), 5)
    assert error.status == 429
    assert error.headers is not None
    assert 1 <= int(error.headers["retry-after"]) <= 60
    rate_limits.take(identity("b" * 16), "read")


def test_recordings_are_counted_separately_and_a_refusal_states_that_no_data_is_lost(
    storage: Storage,
) -> None:
    rate_limits = limits(storage)
    refused(lambda: rate_limits.take(identity(), "read"), 5)
    error = refused(lambda: rate_limits.take(identity(), "record"), 8)
    assert "no data is lost" in error.hint


def test_a_limit_of_zero_is_unlimited(storage: Storage) -> None:
    rate_limits = limits(storage, requests_per_minute=0, failures_per_minute=0)
    for _ in range(100):
        rate_limits.take(identity(), "read")
        rate_limits.count_failure(HERE)
        rate_limits.check_address(HERE, "")


def test_an_address_is_locked_out_but_recently_valid_tokens_pass(storage: Storage) -> None:
    clock = Clock()
    rate_limits = limits(storage, clock)
    rate_limits.record_success("good")
    refused(lambda: rate_limits.count_failure(HERE), 3)
    with pytest.raises(TooOftenError, match="without a valid token"):
        rate_limits.check_address(HERE, "unknown")
    rate_limits.check_address(HERE, "good")
    rate_limits.check_address(THERE, "unknown")
    clock.now = 601
    with pytest.raises(TooOftenError):
        rate_limits.check_address(HERE, "good")


def test_an_ipv6_network_is_one_address(storage: Storage) -> None:
    rate_limits = limits(storage)
    numbers = iter(range(100))
    refused(lambda: rate_limits.count_failure(f"2001:db8::{next(numbers):x}"), 3)
    with pytest.raises(TooOftenError):
        rate_limits.check_address("2001:db8::ffff:1", "")
    rate_limits.check_address("2001:db8:0:1::1", "")


def test_processes_count_together_in_redis(redis_url: str) -> None:
    redis_storage(redis_url).reset()
    limits_a, limits_b = (limits(redis_storage(redis_url)) for _ in range(2))
    refused(lambda: limits_a.take(identity(), "read"), 5)
    with pytest.raises(TooOftenError):
        limits_b.take(identity(), "read")


def opened() -> float:
    value = metrics.REGISTRY.get_sample_value("watchstep_rate_limits_open_total")
    assert value is not None
    return value


def test_requests_pass_if_redis_does_not_respond(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rate_limits = limits(redis_storage(f"redis://:hunter2@127.0.0.1:{free_port()}/0"), clock)
    before = opened()
    for _ in range(20):
        rate_limits.take(identity(), "record")
        rate_limits.count_failure(HERE)
        rate_limits.check_address(HERE, "unknown")
    assert opened() == before + 60
    (line,) = caplog.messages  # and no more of them, until the next attempt
    assert "pass without being counted" in line
    assert "hunter2" not in line
    clock.now = 6
    rate_limits.take(identity(), "record")
    assert len(caplog.messages) == 2


def test_counting_resumes_with_redis(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with running_redis() as broker:
        rate_limits = limits(redis_storage(broker.url), clock)
        rate_limits.take(identity(), "read")
        broker.client.config_set("maxmemory", "1")  # refuses to write, as a full one does
        rate_limits.take(identity(), "read")
        assert "pass without being counted" in caplog.text
        broker.client.config_set("maxmemory", "0")
        clock.now = 6
        refused(lambda: rate_limits.take(identity(), "read"), 4)


@dataclass
class Limited:
    """The API with small limits."""

    api: Api
    app: FastAPI = field(init=False)

    def __post_init__(self) -> None:
        changed = self.api.driven.with_settings(
            requests_per_minute=5, recordings_per_minute=8, failures_per_minute=3
        )
        self.app = create_app(changed.service)

    def until(self, status: int, method: str, path: str, token: str = "", body: object = None) -> Answer:
        for _ in range(30):
            answer = ask(self.app, method, path, token, body)
            if answer.status == status:
                return answer
        raise AssertionError(f"never {status}")


@pytest.fixture
def limited(api: Api) -> Limited:
    return Limited(api)


def test_a_refusal_states_when_to_retry(limited: Limited) -> None:
    answer = limited.until(429, "GET", RUNS, limited.api.token("viewer"))
    assert answer.headers["content-type"] == "application/problem+json"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert ask(limited.app, "GET", RUNS, limited.api.token("viewer")).status == 200


def test_a_refused_recorder_gets_the_hint_that_no_data_is_lost(limited: Limited) -> None:
    token = limited.api.token("recorder")
    assert "no data is lost" in limited.until(429, "POST", RUNS, token, {"run": "run-1"}).text


def asks(rate_limits: RateLimits, times: int) -> int:
    """The number of requests that the storage counted."""
    refused = 0
    for _ in range(times):
        if not rate_limits.count_locally(identity(), "read"):
            rate_limits.take(identity(), "read")
            refused += 1
    return refused


def test_requests_counted_in_memory_count_toward_the_limit(storage: Storage) -> None:
    clock = Clock()
    rate_limits = limits(storage, clock, requests_per_minute=1800)
    assert asks(rate_limits, 1790) < 1790 / 2
    clock.now += 1.0
    with pytest.raises(TooOftenError):
        asks(rate_limits, 900)  # far less than that is left, even where a window ends meanwhile
    assert not rate_limits.count_locally(identity(), "read"), "who is refused is counted one by one"


def test_guessing_tokens_is_limited_and_valid_tokens_pass(limited: Limited) -> None:
    token = limited.api.token("viewer")
    admin = limited.api.token("admin")
    assert ask(limited.app, "GET", RUNS, admin).status == 200
    assert ask(limited.app, "GET", RUNS, token).status == 200
    # Again where a minute ends between two of them, with a token that was not accepted then.
    for _ in range(5):
        unused = limited.api.token("viewer")
        limited.until(429, "GET", RUNS, "wst_0123456789abcdef_guessed")
        refused = [ask(limited.app, "GET", RUNS, limits_a).status for limits_a in (token, unused)]
        if refused == [200, 429]:
            break
    assert refused == [200, 429], "nobody learns that a guess was right"
    assert ask(limited.app, "GET", "/healthz").status == 200
    assert ask(limited.app, "DELETE", f"/v1/tokens/{id_of(token)}", admin).status == 200
    limited.until(429, "GET", RUNS, token)
