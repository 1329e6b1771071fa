"""Addresses of the web page for people. Every link in a notification is made here.

The page is served at the public URL; the API's own addresses begin with ``/v1`` (`watchstep_services.core.events.run_url`).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class PageLinks:
    """Links to the web page. Names are percent-encoded.

    Attributes:
        public_url: URL at which people reach the service, without a slash at its end. If it is empty, every link is empty: the
            address that the service listens on leads nowhere on another machine.
    """

    public_url: str

    def project(self, project: str) -> str:
        """The list of runs of a project."""
        return self._page("projects", project)

    def run(self, project: str, run: str) -> str:
        """The page of a run."""
        return self._page("projects", project, "runs", run)

    def alert(self, project: str, run: str, fingerprint: str) -> str:
        """The page of an alert."""
        return self._page("projects", project, "runs", run, "alerts", fingerprint)

    def picture(self, project: str, run: str, fingerprint: str) -> str:
        """The picture of an alert on the API, without a signature."""
        return self._page("v1", "projects", project, "runs", run, "alerts", fingerprint, "picture.png")

    def _page(self, *parts: str) -> str:
        return (
            "/".join((self.public_url, *(quote(part, safe="") for part in parts))) if self.public_url else ""
        )
