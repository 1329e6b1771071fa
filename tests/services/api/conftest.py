"""The API over ASGI, on SQLite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from fastapi import FastAPI

from tests.services.driving import Driven
from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.connections import LimitedH11, LimitedHttp
from watchstep_services.auth import Role, create_token


@dataclass(frozen=True)
class Client:
    """Requests that reach the application without a socket."""

    app: FastAPI

    def request(
        self,
        method: str,
        path: str,
        *,
        content: str | None = None,
        headers: dict[str, str] | httpx.Headers | None = None,
    ) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as client:
                return await client.request(method, path, content=content, headers=headers)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)


@dataclass(frozen=True)
class Api:
    """A client, and the service behind it."""

    client: Client
    driven: Driven

    @classmethod
    def of(cls, driven: Driven) -> Api:
        """The API of a service."""
        return cls(Client(create_app(driven.service)), driven)

    def with_settings(self, **settings: Any) -> Api:
        """The API of the same service with other settings."""
        return Api.of(self.driven.with_settings(**settings))

    def token(self, role: Role, project: str | None = None) -> str:
        return create_token(self.driven.service.database, role, project)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        role: Role = "operator",
        project: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> httpx.Response:
        """One request with a fresh token of a role."""
        named = {"authorization": f"Bearer {self.token(role, project)}", "content-type": "application/json"}
        content = None if body is None else json.dumps(body)
        return self.client.request(method, path, content=content, headers={**named, **headers})

    def status(self, method: str, path: str, body: Any = None, **options: Any) -> int:
        """The status of a request."""
        return self.call(method, path, body, **options).status_code

    def get(self, path: str, **parameters: Any) -> Any:
        """What a viewer gets, which must exist."""
        query = f"?{urlencode(parameters, doseq=True)}" if parameters else ""
        answer = self.call("GET", f"{path}{query}", role="viewer")
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def api(driven_sqlite: Driven) -> Api:
    return Api.of(driven_sqlite)


@pytest.fixture(params=[LimitedH11, LimitedHttp], ids=["h11", "httptools"])
def protocol(request: pytest.FixtureRequest) -> type[asyncio.Protocol]:
    """Each of uvicorn's protocols, as the service uses them."""
    if request.param is LimitedHttp and LimitedHttp is LimitedH11:
        pytest.skip("httptools is not installed")
    chosen: type[asyncio.Protocol] = request.param
    return chosen
