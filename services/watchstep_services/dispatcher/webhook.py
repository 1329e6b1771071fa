"""Post an event to an address that a rule config names."""

from __future__ import annotations

import json

from watchstep_services.dispatcher.outbox import DueAction, Tried
from watchstep_services.dispatcher.receivers.directory import reach_of
from watchstep_services.dispatcher.receivers.outside import Outside
from watchstep_services.dispatcher.receivers.posting import try_post
from watchstep_services.dispatcher.receivers.reach import AddressRefusedError, parse_address
from watchstep_services.dispatcher.receivers.webhook import webhook_headers
from watchstep_services.service import Service


def try_webhook(service: Service, due: DueAction) -> Tried:
    """Post the event once; the receiver knows a repeated one by its id.

    Redirects are not followed, and addresses that are not public are refused, as of receivers. It is not signed: a receiver
    of kind ``webhook`` is.
    """
    event = due.payload["event"]
    body = json.dumps(event).encode()
    outside = Outside(reach_of(service.settings, due.project), service.settings.webhook_seconds, due.now_ns)
    try:
        address = parse_address(str(due.payload["url"]))
        headers = webhook_headers(str(event["id"]), due.now_ns, body, [])
        return try_post(outside, address, headers, body)
    except ValueError as error:
        return Tried("failed", f"the address cannot be used: {error}")
    except AddressRefusedError as error:
        return Tried("failed", f"{error.what} ({error.mend})")
