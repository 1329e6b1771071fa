"""What may be registered as a store's URL or as a project's prefix, and whether two projects would share objects."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from watchstep.errors import ConfigError
from watchstep.format.layout import check_name
from watchstep.store.store import checked_scheme
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores.opening import check_endpoint

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{1,254}@[A-Za-z0-9][A-Za-z0-9.-]{1,254}")
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=@+,-]{1,255}")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,512}")
_EXTERNAL_ID = re.compile(r"[A-Za-z0-9+=,.@:/_-]{2,1224}")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_ENDPOINT = re.compile(
    r"https?://[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[0-9]{1,5})?/?|https?://\[[0-9a-fA-F:]{2,45}\](:[0-9]{1,5})?/?"
)
_MOST_URL = 1024
_MEND = "use s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, of letters, digits and . _ = @ + , -"

Location = tuple[str, str, tuple[str, ...]]
"""Kind of store, bucket, and the parts of a prefix."""


def checked(registration: StoreRegistration, local_stores: Path | None) -> StoreRegistration:
    """A registration that can be kept, with its URL in one spelling.

    Args:
        registration: as an admin gives it.
        local_stores: the folder below which folders may be registered; None for no folders.

    Raises:
        ConfigError: a part of it cannot be used.
    """
    scheme = checked_scheme(registration.url)
    if scheme in {"", "file"}:
        url = _checked_folder(registration.url, local_stores)
    else:
        url = _checked_bucket(registration.url, scheme)
    _check_access(registration)
    check_endpoint(registration.endpoint)
    return replace(registration, url=url)


def checked_prefix(prefix: str) -> str:
    """A project's prefix below its store, without slashes at its ends; empty for none.

    Raises:
        BadNameError: a part of it cannot be one of a key.
        ConfigError: it is too long.
    """
    parts = prefix.strip("/").split("/") if prefix.strip("/") else []
    if len(prefix) > _MOST_URL // 2:
        raise ConfigError(f"prefix of {len(prefix)} characters", f"use {_MOST_URL // 2} at the most")
    return "/".join(check_name("prefix", part) for part in parts)


def location_of(place: StorePlace) -> Location:
    """Where the objects of a project lie, so that two can be compared."""
    below = (*place.prefix.split("/"), place.project) if place.prefix else (place.project,)
    if place.is_local:
        url = place.registration.url
        path = Path(urlsplit(url).path if url.startswith("file:") else url).expanduser().absolute()
        return "file", "", (*PurePosixPath(path.resolve()).parts, *below)
    parts = urlsplit(place.registration.url)
    kind = {"s3a": "s3", "abfs": "az", "abfss": "az"}.get(parts.scheme, parts.scheme)
    inner = tuple(part for part in parts.path.split("/") if part)
    return kind, parts.netloc, (*inner, *below)


def overlap(one: Location, other: Location) -> bool:
    """Whether one project's objects lie among the other's.

    Two services that speak S3 may each have a bucket of one name; they are held for the same, to be safe.
    """
    shared = min(len(one[2]), len(other[2]))
    return one[:2] == other[:2] and one[2][:shared] == other[2][:shared]


def _checked_bucket(url: str, scheme: str) -> str:
    parts = urlsplit(url)
    if len(url) > _MOST_URL or parts.query or parts.fragment or any(mark in url for mark in "?#%\\"):
        raise ConfigError(f"store {url[:200]!r}: not a plain URL", _MEND)
    named = _ACCOUNT if "@" in parts.netloc and scheme.startswith("abfs") else _BUCKET
    if not named.fullmatch(parts.netloc) or ".." in parts.netloc:
        raise ConfigError(f"store {url!r}: no bucket named {parts.netloc!r} can be", _MEND)
    inner = parts.path.strip("/")
    for part in inner.split("/") if inner else ():
        if not _PART.fullmatch(part):
            raise ConfigError(f"store {url!r}: {part!r} cannot be part of its prefix", _MEND)
    return f"{scheme}://{parts.netloc}/{inner}".rstrip("/")


def _checked_folder(url: str, local_stores: Path | None) -> str:
    if local_stores is None:
        raise ConfigError(
            f"store {url!r}: a folder of the service's machine",
            "use a bucket; or name a folder below which stores may be registered, in WATCHSTEP_LOCAL_STORES",
        )
    parts = urlsplit(url)
    if parts.netloc or "%" in url or "\0" in url:
        raise ConfigError(f"store {url!r}: no plain path", "give an absolute path")
    path = Path(parts.path if parts.scheme else url)
    if not path.is_absolute():
        raise ConfigError(f"store {url!r}: no absolute path", "give an absolute path")
    allowed, whole = local_stores.expanduser().resolve(), path.resolve()
    if not whole.is_relative_to(allowed):
        raise ConfigError(f"store {url!r}: not below {allowed}", "use a folder below it")
    return str(whole)


def _check_access(registration: StoreRegistration) -> None:
    """Roles, regions and endpoints are S3's, and none of them can be read as anything else."""
    given = {
        "role": (registration.role_arn, _ROLE, "an ARN such as arn:aws:iam::123456789012:role/watchstep"),
        "external id": (registration.external_id, _EXTERNAL_ID, "2 to 1224 letters, digits and + = , . @ : / _ -"),
        "region": (registration.region, _REGION, "a region such as eu-central-1"),
        "endpoint": (registration.endpoint, _ENDPOINT, "a URL such as https://minio.example.com:9000"),
    }  # fmt: skip
    for name, (value, pattern, example) in given.items():
        if value and not registration.is_s3:
            raise ConfigError(
                f"store {registration.url!r}: has no {name}", f"leave the {name} out: it is for S3"
            )
        if value and not pattern.fullmatch(value):
            raise ConfigError(f"{name} {value[:200]!r}: cannot be used", f"give {example}")
    if registration.external_id and not registration.role_arn:
        raise ConfigError("external id: given without a role", "give the role's ARN, or leave it out")
