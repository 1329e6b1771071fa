"""Post an event to an address."""

from __future__ import annotations

import json

import httpx

from watchstep_services.dispatcher.outbox import DueAction, Tried
from watchstep_services.events import MEDIA_TYPE
from watchstep_services.service import Service

_TRY_AGAIN = {408, 425, 429}


def try_webhook(service: Service, due: DueAction) -> Tried:
    """Post the event once; the receiver knows a repeated one by its id.

    Redirects are not followed: the address is the one that the rule config names.
    """
    url = str(due.payload["url"])
    try:
        answer = httpx.post(
            url,
            content=json.dumps(due.payload["event"]).encode(),
            headers={"content-type": MEDIA_TYPE, "user-agent": "watchstep"},
            timeout=service.settings.webhook_seconds,
        )
    except httpx.HTTPError as error:
        return Tried("error", f"{url}: {type(error).__name__}: {error}")
    said = f"{url}: answered {answer.status_code}"
    if answer.is_success:
        return Tried("done", said)
    if answer.is_server_error or answer.status_code in _TRY_AGAIN:
        return Tried("error", said)
    return Tried("failed", f"{said}; the receiver refuses the event, so it is not sent again")
