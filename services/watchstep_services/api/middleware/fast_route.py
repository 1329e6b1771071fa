"""A route for endpoints that are called so often that FastAPI's work around each call counts: announcements.

A valid request goes from its body straight to the endpoint, in threads of the route's own: an announcement never waits for a
query. Any other request takes FastAPI's ordinary way, so that one place reports what is wrong with it.
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
    """Calls an endpoint without resolving dependencies. For ``APIRouter(route_class=FastRoute)``.

    The endpoint takes the path's values, a ``body`` of a pydantic model and the ``service``, by name, and returns a `Response`.
    What `benchmarks.service --only announcements` measures is the difference to an ordinary route.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls for each request."""
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
    """The body, or None where the ordinary way must answer."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != _JSON or "idempotency-key" in request.headers:
        return None
    try:
        return model.model_validate(json.loads(await request.body()))
    except (ValidationError, ValueError, RecursionError, ClientDisconnect):
        return None
