"""A route for endpoints with so many requests that FastAPI's overhead per call matters: announcements.

The body of a valid request is passed directly to the endpoint, in threads of the route, so that an announcement never waits for a
query. FastAPI handles any other request, so that all errors are reported in one place.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

_JSON = "application/json"
_THREADS = 8


class FastRoute(APIRoute):
    """Route that calls its endpoint without resolving dependencies. For ``APIRouter(route_class=FastRoute)``.

    The endpoint has the path's values, a ``body`` of a pydantic model and the ``service`` as keyword arguments, and returns a
    `Response`. `benchmarks.service --only announcements` measures the difference to an ordinary route.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler that FastAPI calls for each request."""
        ordinary = super().get_route_handler()
        (field,) = self.dependant.body_params
        model = field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="watchstep-announcements")
        endpoint = self.dependant.call
        assert endpoint is not None

        async def handle(request: Request) -> Response:
            body = await _parse(request, model)
            if body is None:
                return await ordinary(request)
            call = partial(endpoint, **request.path_params, body=body, service=request.app.state.service)
            context = contextvars.copy_context()  # log fields and the trace
            response = await asyncio.get_running_loop().run_in_executor(threads, context.run, call)
            assert isinstance(response, Response)
            return response

        return handle


async def _parse(request: Request, model: type[BaseModel]) -> BaseModel | None:
    """Return the body, or None if FastAPI must handle the request."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != _JSON or "idempotency-key" in request.headers:
        return None
    try:
        return model.model_validate(json.loads(await request.body()))
    except (ValidationError, ValueError, RecursionError, ClientDisconnect):
        return None
