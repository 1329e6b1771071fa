"""``watchstep runs stops``: the audit log of a run's stops, told in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from watchstep_services.cli.calling import call, service_of
from watchstep_services.cli.service_options import DEFAULT_STORE, Service, Store
from watchstep_services.core.console import console, moment


def stops(
    run: Annotated[str, typer.Argument(help="<project>/<run>.")],
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Show every stop of a run, asked for or only recorded: by whose word, on which evidence, each try. Token: WATCHSTEP_TOKEN."""
    project, _, name = run.rpartition("/")
    url, token = service_of(store, service)
    place = f"{url}/v1/projects/{project or 'default'}/audit?run={quote(name)}&limit=1000"
    entries: list[dict[str, Any]] = []
    page = call("GET", place, token)
    entries += page["entries"]
    while page["next_page_token"]:
        page = call("GET", f"{place}&page_token={page['next_page_token']}", token)
        entries += page["entries"]
    out = console()
    if not entries:
        out.print(f"{run}: no stop was asked for")
    for entry in reversed(entries):
        for line in _audit_lines(entry):
            out.print(line, highlight=False, soft_wrap=True)


def _audit_lines(entry: dict[str, Any]) -> Iterator[str]:
    data, head = entry["data"], f"{moment(entry['at_ns'])}  {entry['attempt']}  "
    if entry["kind"] in ("requested", "repeated", "would_have"):
        what = {
            "requested": "asked to stop",
            "repeated": "asked to stop again",
            "would_have": "would have been stopped",
        }
        yield f"{head}{what[entry['kind']]} by {entry['who']}: {data['reason']}"
        yield from _why(data)
    elif entry["kind"] == "tried":
        yield f"{head}try {data['number']}: {data['outcome']}: {data['detail']}"
    elif entry["kind"] == "ended":
        at = f" at step {data['stopped_at_step']}" if data.get("stopped_at_step") is not None else ""
        yield f"{head}{data['state']} after {data['tries']} tries{at}: {data['detail']}"


def _why(data: dict[str, Any]) -> Iterator[str]:
    indent = " " * 21
    if "because" in data:
        words = {
            "dry_run": "its config says 'dry_run'",
            "not_allowed": "nobody has allowed the rule to stop",
            "silenced": f"silence {data.get('silence')} holds stops back",
        }
        yield f"{indent}it was not: {words[data['because']]}"
    if "allowed" in data:
        word = data["allowed"]
        since = f" on {moment(word['at_ns'])}" if word["at_ns"] else ""
        yield f"{indent}allowed by {word['who']}{since}: {word['reason']}"
    if "evidence" in data:
        evidence = data["evidence"]
        yield f"{indent}step {data['step']}; rule digest {data['digest'][:12]}; evidence in {evidence['store']}:"
        for segment in evidence["segments"]:
            yield f"{indent}  {segment}"
