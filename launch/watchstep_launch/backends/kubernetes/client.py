"""Kubernetes' API, as it is used here: JSON by a few verbs, with a deadline for each request. Needs ``watchstep[kubernetes]``.

The official client brings configuration, credentials and TLS. Requests go through its pool of connections as they stand
here: its typed methods choose the content type of a patch by themselves, and differ from version to version.
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
"""For one request. A submission without answer is looked for by three others, all within half a minute."""

_FIRST_REFUSAL = 300
_NOT_FOUND = 404
_DOWN = frozenset((408, 429, 500, 502, 503, 504))
_NO_RIGHT = re.compile(r'User "[^"]*" cannot ')
"""In the message of a refusal that comes from missing rights. Quotas and admission refuse with the same code."""

Object = dict[str, Any]


class KubernetesClient:
    """One cluster's API.

    All methods raise `BackendDownError`, `CredentialsExpiredError`, and `KubernetesRefusedError` for what else is refused. After
    the credentials were refused they are read anew.

    Args:
        context: of kubeconfig's; its current one where it is None, and where there is no kubeconfig, the cluster that this
            process runs in.
    """

    def __init__(self, context: str | None) -> None:
        self._context = context
        self._held: client.ApiClient | None = None
        self._cluster: str | None = None
        self._making = threading.Lock()

    def cluster(self) -> str:
        """The UID of the cluster's namespace kube-system, which stands for the cluster; empty where it may not be seen."""
        if self._cluster is None:
            try:
                found = self.read("/api/v1/namespaces/kube-system")
            except (KubernetesRefusedError, MissingRightError):
                found = {}
            self._cluster = str(found.get("metadata", {}).get("uid", ""))
        return self._cluster

    def read(self, path: str, **query: str) -> Object:
        """An object, or a list of them."""
        return self._object("GET", path, query=query)

    def find(self, path: str) -> Object | None:
        """An object; None where there is none."""
        try:
            return self.read(path)
        except KubernetesRefusedError as error:
            if error.code == _NOT_FOUND:
                return None
            raise

    def create(self, path: str, body: Object) -> Object:
        """The object as it was taken."""
        return self._object("POST", path, body, query={"fieldValidation": "Strict"})

    def patch(self, path: str, uid: str, body: Object) -> Object:
        """Merge a patch into the object with this UID; of another with its name the server changes nothing (409 or 422)."""
        metadata = {**body.get("metadata", {}), "uid": uid}
        return self._object(
            "PATCH", path, {**body, "metadata": metadata}, content="application/merge-patch+json"
        )

    def delete(self, path: str, uid: str, grace_seconds: int | None = None) -> None:
        """Delete the object with this UID, and then what it owns; another with its name stays (409)."""
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
        """Pieces of an answer that is no JSON, as they come."""
        with self._answer("GET", path, query=query) as answer:
            yield self._pieces(answer)

    def _pieces(self, answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        try:
            yield from answer.stream(65536)
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
        with self._answer(method, path, body, query, content) as answer:
            said = b"".join(self._pieces(answer))
        try:
            found: Object = json.loads(said)
        except ValueError as error:
            raise self._down(f"it answers {said[:80]!r}") from error
        return found

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """An answer that is no refusal."""
        api = self._api()
        try:
            headers = {"Accept": "application/json, */*", "User-Agent": "watchstep"}
            for one in api.configuration.auth_settings().values():
                if one["in"] == "header" and one["value"]:
                    headers[one["key"]] = one["value"]
            if body is not None:
                headers["Content-Type"] = content
            answer = api.rest_client.pool_manager.request(
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
            if answer.status >= _FIRST_REFUSAL:
                raise self._refusal(answer.status, b"".join(self._pieces(answer)), method)
            yield answer
        finally:
            # A connection whose answer was read to its end has gone back to the pool by now.
            answer.close()

    def _refusal(self, code: int, said: bytes, method: str) -> Exception:
        try:
            status = json.loads(said)
            reason, message = str(status.get("reason", "")), str(status.get("message", ""))
        except (ValueError, AttributeError):
            reason, message = "", said.decode(errors="replace")
        refused = KubernetesRefusedError(code, reason, message.strip())
        if code == 401:
            unwelcome = self._unwelcome(refused.said)
            self._held = None  # read anew: they may have been renewed by then
            return unwelcome
        if code == 403 and _NO_RIGHT.search(message):
            return self._unwelcome(refused.said, MissingRightError)
        if code == 403 and method != "POST":
            return self._unwelcome(refused.said)
        return self._down(refused.said) if code in _DOWN else refused

    def _api(self) -> client.ApiClient:
        with self._making:
            if self._held is None:
                try:
                    self._held = _configured(self._context)
                except (ConfigException, OSError) as error:
                    raise BackendDownError(
                        f"Kubernetes: no cluster is configured ({str(error)[:300]})",
                        "name a context of kubeconfig's (kubectl config get-contexts), set KUBECONFIG, or run inside of the cluster",
                    ) from error
            return self._held

    def _down(self, why: str) -> BackendDownError:
        return BackendDownError(
            f"{self._where()}: does not answer ({why[:300]})",
            "see whether its API server can be reached: kubectl version",
        )

    def _unwelcome(
        self, why: str, kind: type[CredentialsExpiredError] = CredentialsExpiredError
    ) -> CredentialsExpiredError:
        return kind(
            f"{self._where()}: refused ({why[:300]})",
            "renew the credentials (kubectl auth whoami), or grant the rights that docs/launch/kubernetes.md names",
        )

    def _where(self) -> str:
        held = self._held
        return "Kubernetes" if held is None else f"Kubernetes at {held.configuration.host}"


def _configured(context: str | None) -> client.ApiClient:
    # The official client reads KUBECONFIG once, when it is imported.
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        return config.new_client_from_config(files, context)
    except ConfigException:
        if context is not None:
            raise
        inside = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=inside)
        except ConfigException:
            inside = None
        if inside is None:
            raise
        return client.ApiClient(inside)
