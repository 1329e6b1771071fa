from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from watchstep_services.channels.routing import Matcher, RootNode, parse_matcher, routes_for

TREE = {
    "receiver": "all",
    "group_wait": "30s",
    "routes": [
        {"receiver": "audit", "matchers": ['severity=~"warning|critical"'], "continue": True},
        {
            "receiver": "oncall",
            "matchers": ['severity="critical"'],
            "group_by": ["..."],
            "group_wait": 0,
            "routes": [{"receiver": "vision", "matchers": ["team=vision"], "repeat_interval": "1h30m"}],
        },
        {"matchers": ['rule!="non_finite_values"'], "receiver": "rest", "send_resolved": False},
    ],
}


def reached(tree: dict[str, Any], *notify: str, **labels: str) -> list[str]:
    return [route.receiver for route in routes_for(RootNode.model_validate(tree), labels, notify)]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ({"severity": "critical", "team": "vision"}, ["audit", "vision"]),
        ({"severity": "critical", "team": "text"}, ["audit", "oncall"]),
        ({"severity": "critical"}, ["audit", "oncall"]),
        ({"severity": "warning", "rule": "overfit"}, ["audit", "rest"]),
        ({"severity": "warning", "rule": "non_finite_values"}, ["audit"]),
        ({"severity": "info", "rule": "non_finite_values"}, ["all"]),
        ({"severity": "criticals", "rule": "non_finite_values"}, ["all"]),
    ],
)
def test_the_first_that_matches_takes_it(labels: dict[str, str], names: list[str]) -> None:
    assert reached(TREE, **labels) == names


def test_what_a_node_does_not_say_is_its_parents() -> None:
    tree = RootNode.model_validate(TREE)
    _, vision = routes_for(tree, {"severity": "critical", "team": "vision"})
    assert (vision.group_by, vision.group_wait, vision.repeat_interval) == (("...",), 0.0, 5400.0)
    assert vision.group_labels({"b": "2", "a": "1"}) == {"a": "1", "b": "2"}
    (rest,) = routes_for(tree, {"rule": "overfit", "run": "run-1"})
    assert (rest.group_wait, rest.send_resolved) == (30.0, False)
    assert rest.group_labels({"rule": "overfit", "run": "run-1"}) == {"run": "run-1"}


def test_a_receiver_that_a_rule_names_is_reached_once() -> None:
    assert reached(TREE, "oncall", "mine", "mine", severity="critical") == ["audit", "oncall", "mine"]
    (mine,) = routes_for(RootNode(group_wait=3), {}, ["mine"])
    assert (mine.receiver, mine.group_wait) == ("mine", 3.0)
    assert reached({}) == []


def test_two_routes_to_one_receiver_have_places_of_their_own() -> None:
    tree = {"routes": [{"receiver": "a", "continue": True}, {"receiver": "a"}]}
    places = [route.place for route in routes_for(RootNode.model_validate(tree), {})]
    assert len(set(places)) == 2


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"matchers": ["a=b"]}, "the root takes every alert"),
        ({"routes": [{"matchers": ["a"]}]}, "not a matcher"),
        ({"routes": [{"matchers": ['a=~"("']}]}, "not a valid regular expression"),
        ({"group_wait": "soon"}, "not a duration"),
        ({"repeat_interval": 0}, "greater than 0"),
        ({"receiver": "a b"}, "pattern"),
        ({"route": []}, "Extra inputs"),
        ({"routes": [{}] * 501}, "500"),
    ],
)
def test_what_cannot_be_a_tree_is_told(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RootNode.model_validate(tree)


def test_a_tree_has_a_bound_on_its_depth() -> None:
    tree: dict[str, Any] = {}
    for _ in range(16):
        tree = {"routes": [tree]}
    with pytest.raises(ValidationError, match="16 levels"):
        RootNode.model_validate(tree)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.sampled_from(["=", "!="]))
def test_a_matcher_is_read_as_it_is_written(value: str, operator: Any) -> None:
    matcher = Matcher("team", operator, value)
    assert parse_matcher(str(matcher)) == matcher
    assert matcher.matches({"team": value}) == (operator == "=")
    assert matcher.matches({}) == ((value == "") == (operator == "="))


def test_a_tree_is_read_as_it_is_written() -> None:
    tree = RootNode.model_validate(TREE)
    assert RootNode.model_validate(tree.as_data()) == tree
    assert tree.receivers() == {"all", "audit", "oncall", "vision", "rest"}
