"""The picture of an alert, which messages to chat programs link to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Query, Response

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import run_prefix
from watchstep.reading.run import Run
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.queries.state import Querying
from watchstep_services.api.routes.alerts import Fingerprint
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.problems import documented
from watchstep_services.notify.picture_links import PictureName
from watchstep_services.notify.pictures import can_draw, draw_picture, find_alert_to_draw

router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/alerts/{fingerprint}",
    tags=["alerts"],
    responses=documented(502),
)

MEDIA_TYPE = "image/png"
_HEADERS = {"cache-control": "private, max-age=300", "x-content-type-options": "nosniff"}


@router.get(
    "/picture.png",
    summary="Get the picture of an alert",
    response_class=Response,
    responses={200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
)
@permits("read", signed=True)
def get_picture(
    project: str,
    run: str,
    fingerprint: Fingerprint,
    queries: Querying,
    expires: Annotated[  # noqa: ARG001 - the gate verifies it
        int | None,
        Query(ge=0, le=2**40, description="Of a signed link: when it expires, in seconds since the epoch."),
    ] = None,
    signature: Annotated[  # noqa: ARG001 - the gate verifies it
        Word | None, Query(max_length=64, description="Of a signed link, which needs no token.")
    ] = None,
) -> Response:
    """Return the series that the rule looked at, around the step of the alert, as a PNG. Notifications contain signed links to it."""
    run_prefix(project, run)
    if not can_draw():
        raise NotFoundError(
            "pictures: matplotlib is not installed", "install watchstep[plots] for the service"
        )
    with queries.service.database.read() as session:
        alert = find_alert_to_draw(session, PictureName(project, run, fingerprint))

    @contextmanager
    def opened() -> Iterator[Run]:
        with queries.open_run(project, run) as (opened_run, _):
            yield opened_run

    try:
        png = draw_picture(queries.service, alert, opened)
    except ConfigError as error:
        raise NotFoundError(error.what, error.hint) from error
    return Response(png, media_type=MEDIA_TYPE, headers=_HEADERS)
