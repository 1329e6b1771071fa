from __future__ import annotations

from urllib.parse import unquote, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from watchstep_services.core.links import PageLinks

NAME = st.text(min_size=1, max_size=20)


def test_the_addresses_of_the_page() -> None:
    links = PageLinks("https://watch.example/team")
    assert links.project("vision") == "https://watch.example/team/projects/vision"
    assert links.run("vision", "run-1") == "https://watch.example/team/projects/vision/runs/run-1"
    assert links.alert("a", "b", "c") == "https://watch.example/team/projects/a/runs/b/alerts/c"
    assert (
        links.picture("a", "b", "c") == "https://watch.example/team/v1/projects/a/runs/b/alerts/c/picture.png"
    )


def test_without_a_public_url_there_is_no_link() -> None:
    links = PageLinks("")
    assert {
        links.project("a"),
        links.run("a", "b"),
        links.alert("a", "b", "c"),
        links.picture("a", "b", "c"),
    } == {""}


@given(NAME, NAME, NAME)
def test_no_name_leaves_its_place(project: str, run: str, fingerprint: str) -> None:
    link = PageLinks("https://watch.example").alert(project, run, fingerprint)
    parts = urlsplit(link)
    assert (parts.netloc, parts.query, parts.fragment) == ("watch.example", "", "")
    assert [unquote(part) for part in parts.path.split("/")] == [
        "", "projects", project, "runs", run, "alerts", fingerprint,
    ]  # fmt: skip
