"""Uploads by the XML API of Google Cloud Storage, in front of fake-gcs-server, which takes them by the JSON API only.

obstore writes by the XML API. Each object that it puts becomes an upload by the JSON API with the same condition; the parts of
a large one are collected here first. Reads, listings and deletions are forwarded unchanged: the server answers them itself.
"""

from __future__ import annotations

import http.client
import json
import threading
import uuid
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_HOP = frozenset({"connection", "transfer-encoding", "content-length", "host", "expect"})


class GcsUploads:
    """A server on a port of this machine, in front of another.

    Attributes:
        uploads: upload id → number → bytes, of large objects that are not complete.
    """

    def __init__(self, port: int, behind: int) -> None:
        self.uploads: dict[str, dict[int, bytes]] = {}
        self._behind = behind
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self._open: set[BaseHTTPRequestHandler] = set()
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop listening, and break every connection."""
        self._server.shutdown()
        self._server.server_close()
        for each in list(self._open):
            each.connection.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        uploads = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                uploads._open.add(self)

            def finish(self) -> None:
                uploads._open.discard(self)
                super().finish()

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:  # the client or `close` ended the connection
                    self.close_connection = True

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, data = uploads._answer(
                    self.command, self.path, dict(self.headers.items()), body
                )
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        for verb in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{verb}", Handler.answer)
        return Handler

    def _answer(
        self, verb: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        upload = query.get("uploadId", "")
        if parts.path.startswith(("/storage/", "/upload/")) or verb not in {"PUT", "POST", "DELETE"}:
            return self._forward(verb, path, headers, body)
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.uploads[upload] = {}
            return _document("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        if upload and upload not in self.uploads:
            return 404, {}, b"no such upload"
        if upload and verb == "PUT":
            self.uploads[upload][int(query["partNumber"])] = body
            return 200, {"ETag": f'"{query["partNumber"]}"'}, b""
        if upload and verb == "DELETE":
            del self.uploads[upload]
            return 204, {}, b""
        if upload:
            collected = self.uploads.pop(upload)
            body = b"".join(collected[number] for number in sorted(collected))
        elif verb == "DELETE":
            return self._forward(verb, path, headers, body)
        status, fields, data = self._put(parts.path, headers, body)
        if upload and status == 200:
            return _document("CompleteMultipartUploadResult", f"<ETag>{fields['ETag']}</ETag>")
        return status, fields, data

    def _put(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Upload an object as two parts: conditions of an upload in one part are ignored by the server."""
        bucket, _, key = path.lstrip("/").partition("/")
        condition = {name.lower(): value for name, value in headers.items()}.get("x-goog-if-generation-match")
        query = "uploadType=multipart" + ("" if condition is None else f"&ifGenerationMatch={condition}")
        boundary = uuid.uuid4().hex
        described = json.dumps({"name": unquote(key)}).encode()
        kind = "application/octet-stream"
        document = b"\r\n".join(
            (
                f"--{boundary}\r\nContent-Type: application/json\r\n".encode(),
                described,
                f"--{boundary}\r\nContent-Type: {kind}\r\n".encode(),
                body,
                f"--{boundary}--\r\n".encode(),
            )
        )
        related = {"Content-Type": f"multipart/related; boundary={boundary}"}
        status, fields, data = self._forward(
            "POST", f"/upload/storage/v1/b/{bucket}/o?{query}", related, document
        )
        return status, {**fields, "ETag": f'"{uuid.uuid4().hex}"'}, data

    def _forward(
        self, verb: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._behind, timeout=30)
        try:
            connection.request(
                verb, path, body, {name: value for name, value in headers.items() if name.lower() not in _HOP}
            )
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        except (OSError, http.client.HTTPException) as error:
            return 502, {}, str(error).encode()
        finally:
            connection.close()


def _document(name: str, content: str) -> tuple[int, Mapping[str, str], bytes]:
    text = f'<?xml version="1.0"?><{name}><Bucket>b</Bucket><Key>k</Key>{content}</{name}>'
    return 200, {"Content-Type": "application/xml"}, text.encode()
