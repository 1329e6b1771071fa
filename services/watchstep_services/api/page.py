"""The web page: built files (`web/`), served without a token at ``/``. The page itself logs in, and calls the API with its token.

Its paths are those of `web/src/routing/routes.ts`. Each returns the same document, which shows what the path names.
"""

from __future__ import annotations

import mimetypes
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.convertors import PathConvertor, register_url_convertor

import watchstep_services
from watchstep_services.api.static_documents import StaticDocument, add_document

FOLDER = Path(watchstep_services.__file__).parent / "page"
"""Folder of the built page."""


class AnyPathConvertor(PathConvertor):
    """The rest of a path, with line breaks, which names of tensors may contain."""

    regex = r"[\s\S]*"


register_url_convertor("any_path", AnyPathConvertor())

PATHS = ("/", "/admin", "/projects", "/projects/{path:any_path}")
"""Paths of the page."""

_DIRECTIVES = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' blob: data:",
    "connect-src 'self'",
    "font-src 'self'",
    "base-uri 'none'",
    "form-action 'self'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types svelte-trusted-html",  # Svelte parses the page's own templates
)
POLICY = "; ".join(_DIRECTIVES)
"""The Content-Security-Policy: scripts and styles are files of the page only, and no text is interpreted as markup."""

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_ASSET_HEADERS = {
    "cache-control": "public, max-age=31536000, immutable",  # their names contain a hash of their content
    "x-content-type-options": "nosniff",
}
_MISSING = b"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Watchstep</title>
<h1>The web page is not installed</h1>
<p>This installation was built without it. Released wheels contain it; in a clone, run: make page</p>
<p>The <a href="/docs">API</a> and the command line work without it.</p>
</html>
"""


def install_page(app: FastAPI, folder: Path = FOLDER) -> None:
    """Serve the built page of a folder by an application. If it is not there, a document says so."""
    index = folder / "index.html"
    content = index.read_bytes() if index.is_file() else _MISSING
    page = partial(StaticDocument.of, content, "text/html; charset=utf-8", _HEADERS)
    for path in PATHS:
        add_document(app, path, page, counted=False)
    if not index.is_file():
        return
    _add_file(app, "/icon.svg", folder / "icon.svg", {"x-content-type-options": "nosniff"})
    for asset in (folder / "assets").iterdir():
        _add_file(app, f"/assets/{asset.name}", asset, _ASSET_HEADERS)


def _add_file(app: FastAPI, path: str, file: Path, headers: dict[str, str]) -> None:
    media_type = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    # Not counted: each visit requests some of them, and an office may share an address.
    add_document(app, path, lambda: StaticDocument.of(file.read_bytes(), media_type, headers), counted=False)
