"""The API behind a socket, for tests that need a lasting connection."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.connections import LimitedHttp, server_options
from watchstep_services.service.context import Service


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextmanager
def serving(service: Service, protocol: type[asyncio.Protocol] = LimitedHttp) -> Iterator[str]:
    """Serve on a free port as the service does; gives the URL. Ends with all its streams."""
    app = create_app(service)
    server = _Server(
        uvicorn.Config(app, access_log=False, lifespan="off", **{**server_options(), "http": protocol})
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            assert server.listening.wait(60)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.streams.close()
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
