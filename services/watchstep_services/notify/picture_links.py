"""Signed links to pictures of alerts, for chat programs, which fetch a picture without a token.

A link is valid for one picture and until a time. Its signature is an HMAC of both with a key that is derived from the service's
key, so that every process of the service verifies the links of every other, and none is stored. Whoever reads the message can see
its picture; no link leads to anything else.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import urlencode

from watchstep_services.core.links import PageLinks
from watchstep_services.core.settings import NANOSECONDS, Settings
from watchstep_services.db.encryption import derived_keys

_PURPOSE = "picture links"
_SECONDS_OF_HOUR = 3600
_LATEST = 2**40
"""Later times than that, in seconds since the epoch, are no times."""


@dataclass(frozen=True)
class PictureName:
    """The picture that a link leads to."""

    project: str
    run: str
    fingerprint: str


def picture_link(settings: Settings, picture: PictureName, now_ns: int) -> str:
    """A link to a picture that needs no token; empty if the service has no public URL or no key, or its settings have no such links.

    Args:
        settings: the service's settings.
        picture: the picture.
        now_ns: the time, in nanoseconds since the epoch.
    """
    address = PageLinks(settings.public_url.rstrip("/")).picture(
        picture.project, picture.run, picture.fingerprint
    )
    if not address or not settings.picture_link_hours:
        return ""
    keys = derived_keys(settings, _PURPOSE)
    if not keys:
        return ""
    expires = now_ns // NANOSECONDS + round(settings.picture_link_hours * _SECONDS_OF_HOUR)
    query = {"expires": expires, "signature": _signature(keys[0], picture, expires)}
    return f"{address}?{urlencode(query)}"


def is_valid_link(
    settings: Settings, picture: PictureName, expires: str, signature: str, now_ns: int
) -> bool:
    """Whether a link leads to this picture and has not expired. Takes the same time for every wrong signature.

    Args:
        settings: the service's settings.
        picture: the picture that is requested.
        expires: as in the link.
        signature: as in the link.
        now_ns: the time, in nanoseconds since the epoch.
    """
    if not (expires.isascii() and expires.isdigit() and len(expires) <= len(str(_LATEST))):
        return False
    until = int(expires)
    given = signature.encode(errors="replace")
    matches = [
        hmac.compare_digest(_signature(key, picture, until).encode(), given)
        for key in derived_keys(settings, _PURPOSE)
    ]
    return any(matches) and now_ns // NANOSECONDS < until


def _signature(key: bytes, picture: PictureName, expires: int) -> str:
    # Names contain no line break, so that no two pictures have the same text.
    signed = "\n".join((picture.project, picture.run, picture.fingerprint, str(expires)))
    digest = hmac.new(key, signed.encode(errors="replace"), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
