"""Refusals of an API server. Needs no Kubernetes client, so that it can be imported where none is installed."""

from __future__ import annotations


class KubernetesRefusedError(Exception):
    """The API server said no: ``code`` is HTTP's, ``reason`` Kubernetes' word for it, ``said`` its message."""

    def __init__(self, code: int, reason: str, said: str) -> None:
        super().__init__(said)
        self.code = code
        self.reason = reason
        self.said = said[:500] or reason or f"HTTP {code}"
