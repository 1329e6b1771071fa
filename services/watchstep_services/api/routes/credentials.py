"""AWS credentials for recorders, limited to one attempt and one hour."""

from __future__ import annotations

import logging
from datetime import datetime

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from watchstep.format.layout import attempt_document, run_prefix
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.db.models import RunRow
from watchstep_services.stores.role import scoped_credentials
from watchstep_services.tenancy import NamedStore, open_project, place_for

router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/attempts/{attempt}/credentials", tags=["recording"]
)
_log = logging.getLogger(__name__)


class CredentialsInput(BaseModel):
    """The store that the recorder writes to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: str = Field("", max_length=1024, description="URL; empty: that of the project's new runs.")


class CredentialsOutput(BaseModel):
    """AWS credentials that may write the objects of one attempt only."""

    access_key_id: str
    secret_access_key: str
    session_token: str
    expires_at: datetime = Field(
        description="Expiry, RFC 3339. Request new credentials some minutes earlier."
    )
    store: str = Field(
        description="URL that contains <project>/<run>/, to which the credentials are limited."
    )
    region: str
    endpoint: str


@router.post("", summary="Get credentials for an attempt")
@permits("record")
def post_attempt_credentials(
    project: str,
    run: str,
    attempt: str,
    service: Served,
    response: Response,
    body: CredentialsInput | None = None,
) -> CredentialsOutput:
    """Return credentials of the role of the run's store, limited to the objects that a recorder of this attempt writes."""
    run_prefix(project, run)
    attempt_document(attempt)
    store = NamedStore.of("" if body is None else body.store, project)
    with service.database.read() as session:
        of_project = open_project(session, project)
        run_row = session.execute(select(RunRow).filter_by(project=project, run=run)).scalar_one_or_none()
        named = place_for(session, of_project, store, ())
        place = (named or of_project.placed).place if run_row is None else run_row.place
    credentials = scoped_credentials(place, run, attempt)
    response.headers["cache-control"] = "no-store"
    _log.info(
        "credentials %s for attempt %s of %s/%s until %s",
        credentials.access_key_id, attempt, project, run, credentials.expires_at.isoformat(),
    )  # fmt: skip
    return CredentialsOutput(
        access_key_id=credentials.access_key_id,
        secret_access_key=credentials.secret_access_key,
        session_token=credentials.session_token,
        expires_at=credentials.expires_at,
        store=place.location,
        region=place.registration.region,
        endpoint=place.registration.endpoint,
    )
