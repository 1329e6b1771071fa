"""What the site needs besides its pages: the changelog, the contributor's guide, and links to files of the repository.

A link from a page to a file outside ``docs`` works in the repository and not on the site. There it becomes the file's
path, as code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_PAGES_OF_ROOT = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages that lie at the root of the repository."""
    for source, page in _PAGES_OF_ROOT.items():
        if page != "index.md":
            content = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=content.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Replace links that leave ``docs``."""
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "decisions":
        page.meta["search"] = {"boost": 0.2}  # guides come first in the results
    markdown = markdown.replace("<!-- decisions -->", _decisions())

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, _, fragment = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        place = posixpath.normpath(posixpath.join("docs", folder, path))
        if place in _PAGES_OF_ROOT:
            page_of_root = posixpath.relpath(_PAGES_OF_ROOT[place], folder or ".")
            return f"[{text}]({page_of_root}{'#' if fragment else ''}{fragment})"
        if place == "docs/decisions":
            return f"[{text}]({posixpath.relpath('decisions/README.md', folder or '.')})"
        inside = place.removeprefix("docs/")
        if place.startswith("docs/") and files.get_file_from_path(inside) is not None:
            return link[0]
        if not (ROOT / place).exists():
            return link[0]  # the strict build reports it
        return (
            f"`{place}`" if text.strip("`") in {place, posixpath.basename(place)} else f"{text} (`{place}`)"
        )

    return _LINK.sub(replace, markdown)


def _decisions() -> str:
    """A list of all decisions, by number."""
    titles = (
        (page.name, page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
        for page in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    )
    return "\n".join(f"- [{title}]({name})" for name, title in titles)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Docstrings end the line before an example with two colons, as reStructuredText does; a page ends it with one."""
    return html.replace("::</p>", ":</p>")
