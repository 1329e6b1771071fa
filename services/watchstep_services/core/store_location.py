"""Locations of projects' runs, and the roles to access them. All of it is registered, and no token can change it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from watchstep.errors import ConfigError
from watchstep.store.errors import PROVIDERS


@dataclass(frozen=True)
class StoreRegistration:
    """How a registered store is accessed.

    Attributes:
        url: a bucket's prefix, or a folder.
        role_arn: the AWS role for reading and writing; empty for the service's own credentials.
        external_id: external id for assuming the role.
        region: region of the bucket; empty for the environment's.
        endpoint: endpoint of an S3-compatible service; empty for the environment's.
    """

    url: str
    role_arn: str = ""
    external_id: str = ""
    region: str = ""
    endpoint: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return urlsplit(self.url).scheme in {"", "file"}

    @property
    def is_s3(self) -> bool:
        """Whether it is a bucket on S3."""
        return PROVIDERS.get(urlsplit(self.url).scheme) == "s3"

    @property
    def bucket_and_key(self) -> tuple[str, str]:
        """The bucket, and the prefix in it without slashes at its ends.

        Raises:
            ConfigError: it is not a bucket on S3.
        """
        if not self.is_s3:
            raise ConfigError(
                f"store {self.url}: not a bucket on S3", "AWS roles and their credentials are for S3"
            )
        parts = urlsplit(self.url)
        return parts.netloc, parts.path.strip("/")


@dataclass(frozen=True)
class StorePlace:
    """The location of one project.

    Attributes:
        store_id: id of the registered store.
        version: version of its registration; access may differ between versions.
        registration: how the store is accessed.
        prefix: prefix below the store, without slashes at its ends; empty for none.
        project: name of the project; its runs are in a folder of this name.
    """

    store_id: int
    version: int
    registration: StoreRegistration
    prefix: str
    project: str

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        return self.registration.is_local

    @property
    def location(self) -> str:
        """URL or path that contains ``<project>/<run>/``."""
        return f"{self.registration.url.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def key(self) -> str:
        """The common prefix of the project's keys in an S3 bucket, without slashes at its ends."""
        inner = self.registration.bucket_and_key[1]
        return "/".join(part for part in (inner, self.prefix, self.project) if part)
