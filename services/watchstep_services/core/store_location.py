"""Where a project's runs lie, and by which role they are reached: all of it registered, none of it told by a token."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from watchstep.errors import ConfigError

S3_SCHEMES = frozenset({"s3", "s3a"})


@dataclass(frozen=True)
class StoreRegistration:
    """How a registered store is reached.

    Attributes:
        url: a bucket's prefix, or a folder.
        role_arn: the AWS role by which it is read and written; empty for the service's own credentials.
        external_id: shown when the role is taken.
        region: of the bucket; as the environment says where it is empty.
        endpoint: of a service that speaks S3; as the environment says where it is empty.
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
        return urlsplit(self.url).scheme in S3_SCHEMES

    @property
    def bucket_and_key(self) -> tuple[str, str]:
        """The bucket, and the prefix in it without slashes at its ends.

        Raises:
            ConfigError: it is no bucket on S3.
        """
        if not self.is_s3:
            raise ConfigError(
                f"store {self.url}: no bucket on S3", "AWS roles and their credentials are for S3"
            )
        parts = urlsplit(self.url)
        return parts.netloc, parts.path.strip("/")


@dataclass(frozen=True)
class StorePlace:
    """The place of one project.

    Attributes:
        store_id: of the registered store.
        version: of its registration; a higher one may be reached in another way.
        registration: how the store is reached.
        prefix: below the store, without slashes at its ends; empty for none.
        project: the project; its runs lie in a folder of this name.
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
        """URL or path that holds ``<project>/<run>/``."""
        return f"{self.registration.url.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def key(self) -> str:
        """Of an S3 bucket: what all keys of the project begin with, without slashes at its ends."""
        inner = self.registration.bucket_and_key[1]
        return "/".join(part for part in (inner, self.prefix, self.project) if part)
