"""A small client of the Kubernetes API: JSON requests with a deadline. Requires ``watchstep[kubernetes]``.

The official client provides configuration, credentials and TLS. Requests are sent through its connection pool directly,
because its typed methods choose the content type of a patch by themselves, and differ between versions.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import client, config
from kubernetes.config import ConfigException

from watchstep_launch.backend import BackendDownError, CredentialsExpiredError, MissingRightError
from watchstep_launch.backends.kubernetes.identity import KubernetesRefusedError

SECONDS = urllib3.Timeout(connect=4.0, read=6.0)
"""Timeout of one request. A submission without answer is followed by three searches for the job, all within half a minute."""

_FIRST_ERROR = 300
_NOT_FOUND = 404
_DOWN = frozenset((408, 429, 500, 502, 503, 504))
_NO_RIGHT = re.compile(r'User "[^"]*" cannot ')
"""In the message of a refusal due to missing permissions. Quotas and admission control refuse with the same code."""

Object = dict[str, Any]


class KubernetesClient:
    """The API of one cluster.

    All methods raise `BackendDownError`, `CredentialsExpiredError`, and `KubernetesRefusedError` for other refusals. Credentials are
    loaded again after they were refused.

    Args:
        context: context of the kubeconfig; if None, its current one, or without a kubeconfig the cluster that this
            process runs in.
    """

    def __init__(self, context: str | None) -> None:
        self._context = context
        self._api_client: client.ApiClient | None = None
        self._cluster: str | None = None
        self._lock = threading.Lock()

    def cluster(self) -> str:
        """Return the UID of the namespace kube-system, which identifies the cluster; empty if it is not readable."""
        if self._cluster is None:
            try:
                namespace = self.read("/api/v1/namespaces/kube-system")
            except (KubernetesRefusedError, MissingRightError):
                namespace = {}
            self._cluster = str(namespace.get("metadata", {}).get("uid", ""))
        return self._cluster

    def read(self, path: str, **query: str) -> Object:
        """Return an object, or a list of objects."""
        return self._object("GET", path, query=query)

    def find(self, path: str) -> Object | None:
        """Return an object; None if it does not exist."""
        try:
            return self.read(path)
        except KubernetesRefusedError as error:
            if error.code == _NOT_FOUND:
                return None
            raise

    def create(self, path: str, body: Object) -> Object:
        """Create an object. Returns it as the cluster stores it."""
        return self._object("POST", path, body, query={"fieldValidation": "Strict"})

    def patch(self, path: str, uid: str, body: Object) -> Object:
        """Merge a patch into the object with this UID. The server refuses it for another object with its name (409 or 422)."""
        metadata = {**body.get("metadata", {}), "uid": uid}
        return self._object(
            "PATCH", path, {**body, "metadata": metadata}, content="application/merge-patch+json"
        )

    def delete(self, path: str, uid: str, grace_seconds: int | None = None) -> None:
        """Delete the object with this UID and what it owns. The server refuses it for another object with its name (409)."""
        options: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        self._object("DELETE", path, options)

    @contextmanager
    def stream(self, path: str, **query: str) -> Iterator[Iterator[bytes]]:
        """Yield the pieces of a response that is not JSON, as they arrive."""
        with self._response("GET", path, query=query) as response:
            yield self._pieces(response)

    def _pieces(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        try:
            yield from response.stream(65536)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._down(str(error)) from error

    def _object(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Object:
        with self._response(method, path, body, query, content) as response:
            text = b"".join(self._pieces(response))
        try:
            object_: Object = json.loads(text)
        except ValueError as error:
            raise self._down(f"response {text[:80]!r}") from error
        return object_

    @contextmanager
    def _response(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Yield a successful response."""
        api = self._api()
        try:
            headers = {"Accept": "application/json, */*", "User-Agent": "watchstep"}
            for setting in api.configuration.auth_settings().values():
                if setting["in"] == "header" and setting["value"]:
                    headers[setting["key"]] = setting["value"]
            if body is not None:
                headers["Content-Type"] = content
            response = api.rest_client.pool_manager.request(
                method,
                f"{api.configuration.host}{path}{'?' + urlencode(query) if query else ''}",
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=SECONDS,
                retries=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, ConfigException, OSError) as error:
            raise self._down(str(error)) from error
        try:
            if response.status >= _FIRST_ERROR:
                raise self._error(response.status, b"".join(self._pieces(response)), method)
            yield response
        finally:
            # A connection whose response was read completely is already back in the pool.
            response.close()

    def _error(self, code: int, body: bytes, method: str) -> Exception:
        try:
            status = json.loads(body)
            reason, message = str(status.get("reason", "")), str(status.get("message", ""))
        except (ValueError, AttributeError):
            reason, message = "", body.decode(errors="replace")
        refused = KubernetesRefusedError(code, reason, message.strip())
        if code == 401:
            error = self._credentials_error(refused.message)
            self._api_client = None  # load credentials again: they may have been renewed
            return error
        if code == 403 and _NO_RIGHT.search(message):
            return self._credentials_error(refused.message, MissingRightError)
        if code == 403 and method != "POST":
            return self._credentials_error(refused.message)
        return self._down(refused.message) if code in _DOWN else refused

    def _api(self) -> client.ApiClient:
        with self._lock:
            if self._api_client is None:
                try:
                    self._api_client = _configured(self._context)
                except (ConfigException, OSError) as error:
                    raise BackendDownError(
                        f"Kubernetes: no cluster is configured ({str(error)[:300]})",
                        "name a context of the kubeconfig (kubectl config get-contexts), set KUBECONFIG, or run inside the cluster",
                    ) from error
            return self._api_client

    def _down(self, reason: str) -> BackendDownError:
        return BackendDownError(
            f"{self._address()} does not answer ({reason[:300]})",
            "check whether its API server can be reached: kubectl version",
        )

    def _credentials_error(
        self, reason: str, kind: type[CredentialsExpiredError] = CredentialsExpiredError
    ) -> CredentialsExpiredError:
        return kind(
            f"{self._address()} refused the request ({reason[:300]})",
            "renew the credentials (kubectl auth whoami), or grant the permissions in docs/launch/kubernetes.md",
        )

    def _address(self) -> str:
        api_client = self._api_client
        return "Kubernetes" if api_client is None else f"Kubernetes at {api_client.configuration.host}"


def _configured(context: str | None) -> client.ApiClient:
    # The official client reads KUBECONFIG only once, at import.
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        return config.new_client_from_config(files, context)
    except ConfigException:
        if context is not None:
            raise
        in_cluster = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=in_cluster)
        except ConfigException:
            in_cluster = None
        if in_cluster is None:
            raise
        return client.ApiClient(in_cluster)
