"""How tests went: as text like a diff, and as JUnit's XML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree as ET

from watchstep_rules.testing.running import TestResult


def lines(name: str, results: Sequence[TestResult]) -> Iterator[str]:
    """The results of one file."""
    yield name
    for result in results:
        mark = "ok  " if result.passed else "FAIL"
        yield f"  {mark}  {result.name} ({result.rows} rows, {result.seconds:.2f} s)"
        if result.problem:
            yield from (f"        {line}" for line in result.problem.splitlines())
        for difference in result.differences:
            yield f"        {difference.rule}"
            yield f"          - expected: {difference.expected}"
            yield f"          + got:      {difference.got[0]}"
            yield from (f"                    {line}" for line in difference.got[1:])


def summary(results: Mapping[str, Sequence[TestResult]]) -> str:
    """How many of all passed."""
    every = [result for held in results.values() for result in held]
    failed = sum(not result.passed for result in every)
    tests = f"{len(every)} test{'' if len(every) == 1 else 's'}"
    return f"{tests}, {failed} failed" if failed else f"{tests}, all passed"


def junit(results: Mapping[str, Sequence[TestResult]]) -> bytes:
    """JUnit's XML: one test suite a file."""
    root = ET.Element("testsuites")
    for name, held in results.items():
        suite = ET.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(held)),
            failures=str(sum(bool(result.differences) for result in held)),
            errors=str(sum(bool(result.problem) for result in held)),
            time=f"{sum(result.seconds for result in held):.3f}",
        )
        for result in held:
            case = ET.SubElement(
                suite, "testcase", name=_plain(result.name), classname=name, time=f"{result.seconds:.3f}"
            )
            if result.problem:
                ET.SubElement(case, "error", message=_plain(result.problem))
            for difference in result.differences:
                failure = ET.SubElement(
                    case, "failure", message=_plain(f"{difference.rule}: expected: {difference.expected}")
                )
                failure.text = _plain("got: " + "\n".join(difference.got))
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _plain(text: str) -> str:
    """Without characters that XML cannot hold."""
    return "".join(c if c in "\n\t" or c >= " " else "?" for c in text)
