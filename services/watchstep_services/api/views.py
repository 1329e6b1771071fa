"""Views of recorded statistics: unchanged ones are not sent again, and recently sent ones are not computed again.

A view is determined by the listing of the run's objects and by the parameters of the request, so its ETag is known before any statistics are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from pydantic import BaseModel

from watchstep.reading.run import Run
from watchstep_services.api.middleware.etags import etag_of_inputs, unchanged
from watchstep_services.api.queries.forms import Form, View
from watchstep_services.api.queries.state import Queries, recorded_state


@dataclass(frozen=True)
class ViewRequest:
    """What determines a view besides the recorded data.

    Attributes:
        project: the project.
        run: the run.
        model: model of the response as JSON.
        form: form of the response.
        parameters: JSON-ready parameters of the request.
        condition: the header If-None-Match.
    """

    project: str
    run: str
    model: type[BaseModel]
    form: Form
    parameters: tuple[Any, ...]
    condition: str | None

    def etag(self, run: Run) -> str:
        """Return the ETag of the view of an opened run."""
        created = run.document.created_ns  # a deleted run's objects may have the names of another one's
        return etag_of_inputs(
            self.model, self.project, self.run, created, recorded_state(run), self.form, *self.parameters
        )


def respond(queries: Queries, request: ViewRequest, build: Callable[[Run], View]) -> Response:
    """Respond with a view: 304 if the client has it, else from the cache, else built.

    Raises:
        NotFoundError, RequestRefusedError, OverBudgetError, FormatError, StoreError: as `Queries.open_run`, or as ``build``.
    """
    with queries.open_run(request.project, request.run) as (opened, _):
        etag = request.etag(opened)
        if (same := unchanged(request.condition, etag)) is not None:
            return same
        view = queries.views.get(etag)
        if view is not None:
            return view.response(etag)
        view = build(opened)
        etag = request.etag(opened)  # objects may have been replaced or found damaged meanwhile
    queries.views.add(etag, view)
    return view.response(etag)
