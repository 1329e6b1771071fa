"""Between the service's processes and a server: forwards bytes, and cuts connections when told."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from dataclasses import dataclass

_CHUNK = 1 << 16


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
        self._deaf = 0
        self._swallowing: _Pair | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        listening = threading.Event()
        self._thread.start()

        async def serve() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            listening.set()

        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(serve()))
        listening.wait()

    def close(self) -> None:
        """End it with all its connections."""
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cut(self) -> int:
        """Reset every connection; returns how many those were. What was sent may or may not have arrived."""
        return asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    def swallow_a_commit(self) -> None:
        """Let the next COMMIT reach the server, and reset its connection before the answer."""
        self._loop.call_soon_threadsafe(self._go_deaf)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _go_deaf(self) -> None:
        self._deaf += 1

    async def _cut(self) -> int:
        found = list(self._pairs)
        for pair in found:
            _reset(pair)
        self.cuts += len(found)
        return len(found)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, server)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._ask(pair, reader), self._answer(pair, answers))
        finally:
            self._pairs.discard(pair)
            for end in (writer, server):
                end.close()

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


def _reset(pair: _Pair) -> None:
    for end in (pair.client, pair.server):
        held: socket.socket | None = end.get_extra_info("socket")
        if held is not None and held.fileno() >= 0:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.transport.abort()
