"""moto's S3 server, and how often it was asked for what."""

from __future__ import annotations

import os
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class CountingS3:
    """Counts requests by bucket and kind.

    Attributes:
        counts: (bucket, PUT | GET | LIST | HEAD | …) → requests.
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        bucket = environ["PATH_INFO"].lstrip("/").split("/")[0]
        listing = "list-type" in environ.get("QUERY_STRING", "")
        with self._lock:
            self.counts[bucket, "LIST" if listing else environ["REQUEST_METHOD"]] += 1
        return self._application(environ, start)

    def of(self, bucket: str) -> Counter[str]:
        """Requests to one bucket so far, by kind."""
        with self._lock:
            return Counter({kind: n for (name, kind), n in self.counts.items() if name == bucket})


@contextmanager
def serve(buckets: Iterable[str]) -> Iterator[CountingS3]:
    """A server on this machine with empty buckets; the environment leads every client to it."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    counting = CountingS3(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, counting, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        for bucket in buckets:
            call = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
            with urllib.request.urlopen(call):
                pass
        counting.counts.clear()
        yield counting
    finally:
        server.shutdown()
        thread.join(5)
