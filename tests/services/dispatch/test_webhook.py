from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.services.dispatch.receiver import Receiver, receiving
from tests.services.driving import Driven
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.models import ActionRow


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def fired(driven: Driven, store: Store, url: str) -> ActionRow:
    """The webhook action of an alert that has fired."""
    rule = RuleConfig.model_validate(
        {"rule": "non_finite_values", "name": "notifying", "actions": [{"webhook": url}]}
    )
    recording = Recording(store).begin()
    run_id = driven.register(rules=[rule])
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    return next(action for action in driven.actions(run_id) if action.kind == "webhook")


def test_an_event_is_delivered_once(driven: Driven, folder_store: Store, receiver: Receiver) -> None:
    action = driven.finish(fired(driven, folder_store, receiver.url).id)
    assert action.state == "done"
    assert receiver.types == ["application/cloudevents+json"]
    (event,) = receiver.events
    assert event in driven.events(action.run_id)
    assert (event["id"], event["specversion"], event["type"]) == (
        action.event_id,
        "1.0",
        "io.watchstep.alert.firing",
    )
    assert event["data"]["finding"]["step"] == 5
    assert event["data"]["rule_config"]["name"] == "notifying"
    assert driven.finish(action.id).tries == 1
    assert len(receiver.events) == 1


def test_a_receiver_that_fails_is_tried_again(
    driven: Driven, folder_store: Store, receiver: Receiver
) -> None:
    receiver.answers = [500, 429]
    action = driven.finish(fired(driven, folder_store, receiver.url).id)
    assert [outcome for outcome, _ in driven.tries(action.id)] == ["error", "error", "done"]
    assert len({event["id"] for event in receiver.events}) == 1


def test_a_delivery_that_is_refused_is_not_repeated(
    driven: Driven, folder_store: Store, receiver: Receiver
) -> None:
    receiver.answers = [404]
    assert driven.finish(fired(driven, folder_store, receiver.url).id).state == "failed"
    assert len(receiver.events) == 1


def test_the_number_of_tries_is_limited(driven_sqlite: Driven, folder_store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    driven = driven_sqlite.with_settings(max_tries=3)
    action = driven.finish(fired(driven, folder_store, f"http://127.0.0.1:{port}/").id)
    assert (action.state, action.tries) == ("failed", 3)
    assert "ConnectError" in action.outcome
