"""Requests over connections that are kept: to open one for each costs the service half as much again as the answer."""

from __future__ import annotations

import http.client
import os
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_MOST_KEPT = 8
_RETRY_AFTER = "Retry-After"


@dataclass(frozen=True)
class Answer:
    """What came back: HTTP's status, the content, and ``Retry-After``; empty where the answer has none."""

    status: int
    content: bytes
    retry_after: str = ""


class KeptConnections:
    """Connections to one http or https address. Thread-safe; a forked child has its own.

    An address that the environment names a proxy for is asked through that, by a connection for each request.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._kept: list[tuple[int, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._kept)

    def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float, most: int) -> Answer:
        """Send a body, twice where a kept connection turns out to be closed: to be used for what may come twice.

        Args:
            url: what to ask, at the address.
            body: as it is.
            headers: besides those of every request.
            seconds: to wait for each step of it.
            most: bytes of the answer that are read.

        Raises:
            OSError: there was no answer.
        """
        if self._by_proxy():
            return _by_urllib(url, body, headers, seconds, most)
        kept = self._take()
        if kept is not None:
            try:
                return self._ask(kept, url, body, headers, seconds, most)
            except ConnectionError:  # the other side had closed it meanwhile
                pass
        return self._ask(self._opened(seconds), url, body, headers, seconds, most)

    def _ask(
        self,
        one: http.client.HTTPConnection,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        seconds: float,
        most: int,
    ) -> Answer:
        try:
            one.timeout = seconds
            if one.sock is not None:
                one.sock.settimeout(seconds)
            one.request("POST", url[len(self._origin) :], body, dict(headers))
            answer = one.getresponse()
            data = answer.read(most)
            whole = answer.isclosed() and not answer.will_close
        except BaseException as error:
            one.close()
            if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
                raise OSError(f"no HTTP: {error!r}") from error
            raise
        self._give_back(one, whole=whole)
        return Answer(answer.status, data, answer.headers.get(_RETRY_AFTER, ""))

    def _opened(self, seconds: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=seconds)

    def _take(self) -> http.client.HTTPConnection | None:
        with self._lock:
            while self._kept:
                process, one = self._kept.pop()
                if process == os.getpid():
                    return one
                one.close()
        return None

    def _give_back(self, one: http.client.HTTPConnection, *, whole: bool) -> None:
        with self._lock:
            if whole and len(self._kept) < _MOST_KEPT:
                self._kept.append((os.getpid(), one))
                return
        one.close()

    def _by_proxy(self) -> bool:
        named = urllib.request.getproxies()
        scheme = "https" if self._secure else "http"
        return (scheme in named or "all" in named) and not urllib.request.proxy_bypass(self._host)


def _close_all(kept: list[tuple[int, http.client.HTTPConnection]]) -> None:
    for _, one in kept:
        one.close()  # in a forked child, its own descriptor of it


def _by_urllib(url: str, body: bytes, headers: Mapping[str, str], seconds: float, most: int) -> Answer:
    request = urllib.request.Request(url, body, dict(headers), method="POST")  # noqa: S310 - the scheme was checked
    try:
        # Not urlopen, which keeps to the proxies that were named when a process first used it.
        with urllib.request.build_opener().open(request, timeout=seconds) as answer:
            return Answer(answer.status, answer.read(most))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(most), error.headers.get(_RETRY_AFTER, ""))
