"""Too large or too deep requests are refused, whatever their headers state."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import tracemalloc
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.api.conftest import Api
from tests.services.api.walking import operations, published_document
from tests.services.recording import PROJECT
from watchstep_services.api.middleware.request_limits import (
    MOST_BODY,
    MOST_DEPTH,
    MOST_HEADER_BYTES,
    MOST_HEADERS,
    MOST_PATH,
    MOST_QUERY,
    depth_of,
    is_text,
)

RUNS = "/v1/projects/vision/runs"


def send(
    api: Api, content: bytes, *, chunked: bool = False, path: str = RUNS, length: str | None = None
) -> httpx.Response:
    async def chunks() -> Any:
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]

    async def post() -> httpx.Response:
        token = api.token("operator")
        named = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        if length is not None:
            named["content-length"] = length
        transport = httpx.ASGITransport(api.client.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as client:
            return await client.post(path, content=chunks() if chunked else content, headers=named)

    return asyncio.run(post())


def body_of(size: int) -> bytes:
    body = json.dumps({"run": "run-1"}).encode()
    return body + b" " * (size - len(body))


def is_problem(answer: httpx.Response, status: int, message: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert message in answer.json()["detail"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(api: Api, chunked: bool) -> None:
    assert send(api, body_of(MOST_BODY), chunked=chunked).status_code == 200
    is_problem(send(api, body_of(MOST_BODY + 1), chunked=chunked), 413, "over the limit")


def test_a_content_length_that_is_too_small_or_invalid(api: Api) -> None:
    is_problem(send(api, body_of(MOST_BODY + 1), length="10"), 413, "over the limit")
    is_problem(send(api, body_of(10), length="9" * 40), 413, "over the limit")
    assert send(api, body_of(20), length="-1").status_code == 200


def test_a_body_with_a_too_large_content_length_is_not_read(api: Api) -> None:
    read: list[int] = []

    async def chunks() -> Any:
        read.append(1)
        yield b"{}"

    async def post() -> int:
        headers = {"authorization": f"Bearer {api.token('operator')}", "content-length": str(MOST_BODY + 1)}
        transport = httpx.ASGITransport(api.client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as client:
            return (await client.post(RUNS, content=chunks(), headers=headers)).status_code

    assert (asyncio.run(post()), read) == (413, [])


@pytest.mark.parametrize("kind", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [MOST_DEPTH + 1, 990, 5000, 200_000])
def test_a_too_deep_body_is_refused_by_every_route(api: Api, kind: str, depth: int) -> None:
    closing = {"[": "]", '{"a":': "}", '[{"a":': "}]"}[kind]
    bomb = (kind * depth + "1" + closing * depth).encode()
    whole = b'{"run": "run-1", "rules": [%s]}' % bomb
    begun = bomb[: len(kind) * (MOST_DEPTH + 1)]
    for content in (bomb, begun, whole):
        if len(content) <= MOST_BODY:
            is_problem(send(api, content), 422, "deep")


def test_very_many_lists_are_refused_before_they_are_parsed(api: Api) -> None:
    for content in (b"[" + b"[]," * 60_000 + b"[]]", b'{"run":"run-1","rules":[' + b"{}," * 60_000 + b"{}]}"):
        is_problem(send(api, content), 422, "lists and objects")


@pytest.mark.ci
def test_a_bomb_is_refused_by_every_route(api: Api) -> None:
    bomb = b'{"a":' * 2000 + b"1" + b"}" * 2000
    for operation in operations():
        if "requestBody" in operation.definition and operation.method == "POST":
            answer = send(api, bomb, path=operation.at({"project": "vision"}))
            assert 400 <= answer.status_code < 500, operation.path


def test_a_body_of_the_maximum_depth_is_parsed(api: Api) -> None:
    content = b"[" * MOST_DEPTH + b"]" * MOST_DEPTH
    answer = send(api, content)
    assert answer.status_code == 422
    assert "deep" not in answer.text


@pytest.mark.parametrize(
    "content", [b"1" * 100_000, b'"\\ud800"', b"\xff\xfe", b"nul", b'{"run": 1e999999}', b""]
)
def test_an_invalid_body_is_a_client_error(api: Api, content: bytes) -> None:
    assert 400 <= send(api, content).status_code < 500


@pytest.mark.parametrize(
    "content",
    [
        b'{"run": "\\ud800"}',
        b'{"\\uDFFF": 1}',
        b'{"run": "\\ud800\\ud800\\udc00"}',
        b'{"run": "\\\\ud83d\\ude00"}',
        b'{"run": "\xed\xa0\x80"}',
        '{"run": "run-1"}'.encode("utf-16"),
        '{"run": "run-1"}'.encode("utf-32-le"),
    ],
)
def test_a_body_that_is_not_text_is_refused_by_every_route(api: Api, content: bytes) -> None:
    is_problem(send(api, content), 422, "unpaired surrogate")
    is_problem(send(api, content, path="/v1/projects/vision/silences"), 422, "unpaired surrogate")


@given(st.text(), st.booleans())
def test_text_is_what_utf_8_encodes(text: str, ascii_only: bool) -> None:
    data = json.dumps([text], ensure_ascii=ascii_only).encode()
    assert is_text(data)
    assert is_text(data.replace(b"\\u", b"\\\\u"))


escapes = st.sampled_from(["\\\\", "\\n", "\\ud83d", "\\uDE00", "\\u0041", "u", "d83d", '\\"', "\xe9"])


@given(st.lists(escapes, max_size=8))
def test_a_surrogate_without_its_other_half_is_not_text(parts: list[str]) -> None:
    data = f'"{"".join(parts)}"'.encode()
    try:
        json.loads(data).encode()
    except UnicodeEncodeError:
        assert not is_text(data)
    else:
        assert is_text(data)


def test_an_address_and_headers_over_the_limit(api: Api) -> None:
    token = api.token("viewer")
    named = {"authorization": f"Bearer {token}"}
    for path, headers, status in (
        (f"/v1/{'x' * MOST_PATH}", named, 414),
        (f"{RUNS}?page_token={'x' * MOST_QUERY}", named, 414),
        (RUNS, {**named, **{f"x-{n}": "1" for n in range(MOST_HEADERS)}}, 431),
        (RUNS, {**named, "x-large": "1" * MOST_HEADER_BYTES}, 431),
    ):
        answer = api.client.request("GET", path, headers=headers)
        is_problem(answer, status, "over the limit")


def test_a_header_that_is_ambiguous_is_refused(api: Api) -> None:
    token = f"Bearer {api.token('viewer')}"
    for name, value in (
        ("host", "service.test"),
        ("authorization", token),
        ("content-type", "application/json"),
    ):
        headers = httpx.Headers([("authorization", token), *[(name, value)] * 2])
        is_problem(api.client.request("GET", RUNS, headers=headers), 400, f"header {name}: ")
    headers = httpx.Headers([("authorization", token), *[("accept", "application/json")] * 2])
    assert api.client.request("GET", RUNS, headers=headers).status_code == 200


@pytest.mark.ci
def test_head_is_get_without_a_body(api: Api) -> None:
    """On every address, with a token and without, and also where GET is refused."""
    driven = api.driven.with_settings(failures_per_minute=0)
    driven.register()
    api = Api.of(driven)
    headers = {"authorization": f"Bearer {api.token('viewer')}"}
    values = {"project": PROJECT, "run": "run-1", "fingerprint": "f" * 32}
    paths = [
        re.sub(r"\{(\w+)\}", lambda part: values.get(part[1], "1"), path)
        for path in published_document()["paths"]
    ]
    for path in ("/", "/docs", "/openapi.json", "/nothing", *paths):
        for chosen in (headers, None):
            if path.endswith("/stream") and chosen:
                continue
            got, head = (api.client.request(method, path, headers=chosen) for method in ("GET", "HEAD"))
            assert head.content == b"", path
            assert head.status_code == got.status_code, path
            assert head.headers.keys() == got.headers.keys(), path
            assert got.status_code < 400 or got.headers["cache-control"] == "no-store", path
    stream = f"/v1/projects/{PROJECT}/events/stream"
    assert api.client.request("HEAD", stream, headers=headers).status_code == 200
    refused = api.client.request("POST", "/healthz", headers=headers)
    assert (refused.status_code, refused.headers["allow"], refused.headers["cache-control"]) == (
        405,
        "GET, HEAD",
        "no-store",
    )


_LONG = b'"' + b"x" * 500_000 + b'"'
_SEGMENTS = b'"attempt": "a1", "segments": [{"node": "n", "writer": "w0", "seq": 0, "first": 0, "last": 1}]'


@pytest.mark.parametrize(
    "content",
    [
        b'{"health": {"k": ' + _LONG + b"}, " + _SEGMENTS + b"}",
        b'{"health": {"k": ' + _LONG + b"}, " + _SEGMENTS,
        b'{"health": {"k": ' + _LONG + b"}, " + _SEGMENTS.replace(b'"a1"', b"1") + b"}",
        b'{"health": {"k": ' + _LONG + b', "n": ' + b"9" * 5000 + b"}, " + _SEGMENTS + b"}",
    ],
    ids=["a validator refuses it", "its end is missing", "a value has another type", "a number is too long"],
)
def test_a_refused_body_leaves_memory_without_a_collection(api: Api, content: bytes) -> None:
    path = f"{RUNS}/run-1/announcements"
    headers = [
        (b"authorization", f"Bearer {api.token('recorder', 'vision')}".encode()),
        (b"content-type", b"application/json"),
    ]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1), "server": ("service.test", 80),
    }  # fmt: skip

    async def post() -> int:
        requests, statuses = [{"type": "http.request", "body": content}], []

        async def receive() -> Any:
            return requests.pop() if requests else {"type": "http.disconnect"}

        async def answer(message: Any) -> None:
            statuses.append(message.get("status"))

        await api.client.app({**scope, "headers": list(headers), "state": {}}, receive, answer)
        return int(statuses[0])

    async def post_repeatedly() -> int:
        statuses = {await post() for _ in range(2)}
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            statuses |= {await post() for _ in range(20)}
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
            assert statuses == {422}

    assert asyncio.run(post_repeatedly()) < 4 * len(content)


def depth_by_hand(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_by_hand(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_by_hand(item) for item in value), default=0)
    return 0


leaves = st.one_of(st.none(), st.integers(), st.text(alphabet='[]{}"\\\n a\u00e9'))
documents = st.recursive(
    leaves,
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text('[{"\\', max_size=3), children, max_size=3)
    ),
)


@given(documents, st.booleans())
def test_depth_is_that_of_the_document(document: Any, ascii_only: bool) -> None:
    many = [document, [[]] * MOST_DEPTH]  # so many brackets that the depth is checked
    assert depth_of(json.dumps(many, ensure_ascii=ascii_only).encode()) == max(3, depth_by_hand(many))


@given(st.binary(max_size=200))
def test_any_bytes_have_a_depth(content: bytes) -> None:
    padded = content + b"[]" * MOST_DEPTH
    assert 0 <= depth_of(padded) <= len(padded)
