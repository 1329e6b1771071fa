"""Between the service's processes and a server: forwards bytes, and cuts connections when told."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

_CHUNK = 1 << 16
_LOOK_SECONDS = 0.05


@dataclass(eq=False)
class _Pair:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter


class Proxy:
    """Forwards from a port of its own to a server's, in a thread of its own.

    Attributes:
        port: where it listens.
        cuts: connections that were reset.
        swallowed: answers to COMMIT that never arrived.
    """

    def __init__(self, target: int) -> None:
        self.port, self.cuts, self.swallowed = 0, 0, 0
        self._target = target
        self._pairs: set[_Pair] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._deaf = 0
        self._swallowing: _Pair | None = None
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._thread.start()

    def close(self) -> None:
        """End it with all its connections: no socket of it is open when this returns."""
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def cut(self) -> int:
        """Reset every connection; returns how many those were. What was sent may or may not have arrived."""
        return asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    def swallow_a_commit(self) -> None:
        """Let the next COMMIT reach the server, and reset its connection before the answer."""
        self._loop.call_soon_threadsafe(self._go_deaf)

    def _run(self) -> None:
        self._loop.run_until_complete(self._listen())
        self._loop.close()

    async def _listen(self) -> None:
        # Not asyncio's server: what that accepts while it is closed stays open.
        with self._listener:
            self._loop.add_reader(self._listener, self._accept)
            await self._ending.wait()
            self._loop.remove_reader(self._listener)
        while self._serving:
            await self._cut()
            await asyncio.wait(self._serving, timeout=_LOOK_SECONDS)  # of those, some only begin

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # whoever asked is gone
            return
        task = self._loop.create_task(self._serve(client))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _go_deaf(self) -> None:
        self._deaf += 1

    async def _cut(self) -> int:
        found = list(self._pairs)
        for pair in found:
            _reset(pair)
        self.cuts += len(found)
        return len(found)

    async def _serve(self, accepted: socket.socket) -> None:
        reader, client = await asyncio.open_connection(sock=accepted)
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            client.transport.abort()
            await _closed(client)
            return
        pair = _Pair(client, server)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._ask(pair, reader), self._answer(pair, answers))
        finally:
            await _closed(server)
            await _closed(client)  # one that does not read what it is still sent can be cut until then
            self._pairs.discard(pair)

    async def _ask(self, pair: _Pair, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(_CHUNK):
                if self._deaf and b"COMMIT" in data:
                    self._deaf -= 1
                    self._swallowing = pair
                pair.server.write(data)
                await pair.server.drain()
        except OSError:
            pass
        finally:
            pair.server.close()

    async def _answer(self, pair: _Pair, answers: asyncio.StreamReader) -> None:
        try:
            while data := await answers.read(_CHUNK):
                if self._swallowing is pair:
                    self._swallowing = None
                    self.swallowed += 1
                    _reset(pair)
                    return
                pair.client.write(data)
                await pair.client.drain()
        except OSError:
            pass
        finally:
            pair.client.close()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def _reset(pair: _Pair) -> None:
    for end in (pair.client, pair.server):
        held: socket.socket | None = end.get_extra_info("socket")
        if held is not None and held.fileno() >= 0:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.transport.abort()
