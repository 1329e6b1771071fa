"""A stand-in for a cluster: it speaks Kubernetes' API on loopback, and runs the commands of pods as processes of this machine.

NO CLUSTER: what it does follows the API's documentation and published schemas, and was compared with no real API server.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.launch.backends.kubernetes.double_controllers import Cluster
from tests.launch.backends.kubernetes.double_store import API_VERSIONS, Object, StatusError

TOKEN = "a-token-of-the-tests"
_PATH = re.compile(r"(/api/v1|/apis/[^/]+/[^/]+)/(?:namespaces/([^/]+)/)?([a-z]+)(?:/([^/]+))?(/log)?")


@dataclass
class Double:
    """The stand-in, running.

    Attributes:
        url: where it answers.
        cluster: what it holds; whoever touches it holds its ``lock``.
        token: that it wants.
        forbidden: verbs on kinds that this token may not: ``("create", "secrets")``.
        quota: a message by which admission refuses what is created.
        faults: for requests whose "METHOD path" has this in it: "silent" hangs up before, "unanswered" after the request
            was served; a number is answered as such. Each is used as often as it says.
        installed: whether Kubeflow's API is there.
        asked: requests, as "METHOD path".
    """

    url: str = ""
    cluster: Cluster = field(default_factory=Cluster)
    token: str = TOKEN
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    quota: str = ""
    faults: list[list[Any]] = field(default_factory=list)
    installed: bool = True
    asked: list[str] = field(default_factory=list)

    def objects(self, kind: str, namespace: str = "default") -> list[Object]:
        """What it holds of a kind, as it is now."""
        with self.cluster.lock:
            held: list[Object] = json.loads(json.dumps(self.cluster.store.all(kind, namespace)))
            return held

    def fault(self, what: str, how: str | int, times: int = 1) -> None:
        """Have requests fail: see ``faults``."""
        self.faults.append([what, how, times])

    def write_kubeconfig(self, file: Path, *, token: str = "") -> Path:
        """A kubeconfig by which clients reach it."""
        named: Mapping[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "double",
            "clusters": [{"name": "double", "cluster": {"server": self.url}}],
            "users": [{"name": "tester", "user": {"token": token or self.token}}],
            "contexts": [{"name": "double", "context": {"cluster": "double", "user": "tester"}}],
        }
        file.write_text(json.dumps(named))
        return file

    def answer(self, method: str, target: str, body: Object | None) -> tuple[int, bytes]:
        """Serve a request."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        found = _PATH.fullmatch(url.path)
        if found is None:
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        group, namespace, plural, name, log = found.groups()
        kind = next((kind for kind in API_VERSIONS if f"{kind.lower()}s" == plural), "")
        version = API_VERSIONS.get(kind)
        if version is None or group != ("/api/v1" if version == "v1" else f"/apis/{version}"):
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        if not self.installed and kind in ("TrainJob", "JobSet"):
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        verb = _verb(method, name)
        if (verb, plural) in self.forbidden:
            said = f'cannot {verb} resource "{plural}" in API group "" in the namespace "{namespace}"'
            raise StatusError(403, "Forbidden", f'{plural} is forbidden: User "tester" {said}')
        with self.cluster.lock:
            if log:
                return 200, self._log(namespace, name, query)
            serve: Callable[..., Object] = getattr(self, f"_{verb}")
            answered = serve(kind, namespace or "", name, body, query)
            return 201 if verb == "create" else 200, json.dumps(answered).encode()

    def _get(self, kind: str, namespace: str, name: str, body: Object | None, query: Any) -> Object:
        return self.cluster.store.get(kind, namespace, name)

    def _list(self, kind: str, namespace: str, name: str, body: Object | None, query: Any) -> Object:
        items = self.cluster.store.all(kind, namespace, query.get("labelSelector", ""))
        # As the API server does it: items of a list do not say what they are.
        plain = [{key: one[key] for key in one if key not in ("kind", "apiVersion")} for one in items]
        return {"apiVersion": API_VERSIONS[kind], "kind": f"{kind}List", "metadata": {}, "items": plain}

    def _create(self, kind: str, namespace: str, name: str, body: Object | None, query: Any) -> Object:
        assert body is not None
        if self.quota and kind in ("Job", "TrainJob"):
            raise StatusError(403, "Forbidden", self.quota)
        made = self.cluster.store.create(kind, namespace, body)
        answered: Object = json.loads(json.dumps(made))
        self.cluster.see(made)
        return answered

    def _patch(self, kind: str, namespace: str, name: str, body: Object | None, query: Any) -> Object:
        assert body is not None
        changed = self.cluster.store.patch(kind, namespace, name, body)
        self.cluster.see(changed)
        return changed

    def _delete(self, kind: str, namespace: str, name: str, body: Object | None, query: Any) -> Object:
        held, options = self.cluster.store.get(kind, namespace, name), body or {}
        uid = held["metadata"]["uid"]
        if (asked := options.get("preconditions", {}).get("uid", uid)) != uid:
            said = f"Precondition failed: UID in precondition: {asked}, UID in object meta: {uid}"
            raise StatusError(
                409, "Conflict", f'Operation cannot be fulfilled on {kind.lower()}s "{name}": {said}'
            )
        self.cluster.delete(held, options.get("gracePeriodSeconds"))
        return held

    def _log(self, namespace: str, name: str, query: Mapping[str, str]) -> bytes:
        pod = self.cluster.store.get("Pod", namespace, name)
        if query.get("container") not in [one["name"] for one in pod["spec"]["containers"]]:
            raise StatusError(
                400, "BadRequest", f"container {query.get('container')} is not valid for pod {name}"
            )
        return self.cluster.kubelet.log(
            pod, query.get("sinceTime", ""), stamped=query.get("timestamps") == "true"
        )


def _verb(method: str, name: str | None) -> str:
    if method == "GET":
        return "get" if name else "list"
    return {"POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    double: Double

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PATCH(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        sent = self.rfile.read(length)
        asked = f"{self.command} {self.path}"
        self.double.asked.append(asked)
        fault = self._fault(asked)
        if fault == "silent":
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._status(StatusError(fault, "", f"answered {fault} by the tests"))
            return
        try:
            self._check_headers()
            code, data = self.double.answer(self.command, self.path, json.loads(sent) if sent else None)
        except StatusError as error:
            self._status(error)
            return
        if fault == "unanswered":
            self.close_connection = True
            return
        self._send(code, data)

    def _check_headers(self) -> None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if (scheme.lower(), token) != ("bearer", self.double.token):
            raise StatusError(401, "Unauthorized", "Unauthorized")
        due = {"POST": "application/json", "PATCH": "application/merge-patch+json"}
        if self.command in due and self.headers.get("Content-Type") != due[self.command]:
            raise StatusError(
                415, "UnsupportedMediaType", f"the body of the request was {self.headers['Content-Type']}"
            )

    def _fault(self, asked: str) -> str | int | None:
        for one in self.double.faults:
            if one[2] and one[0] in asked:
                one[2] -= 1
                found: str | int = one[1]
                return found
        return None

    def _status(self, error: StatusError) -> None:
        said = {
            "apiVersion": "v1",
            "kind": "Status",
            "metadata": {},
            "status": "Failure",
            "message": error.message,
            "reason": error.reason,
            "code": error.code,
        }
        self._send(error.code, json.dumps(said).encode())

    def _send(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up, or that do not trust it, are what is tested."""


@contextmanager
def running_double(tls: ssl.SSLContext | None = None) -> Iterator[Double]:
    """Start one, and leave nothing of it behind."""
    double = Double()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"double": double}))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    double.url = f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        double.cluster.close()
