from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from pydantic import ValidationError

from tests.services.channels.samples import sample
from tests.services.channels.sending import delivery_context, send
from watchstep_services.channels.aws import (
    MOST_SMS,
    EventBridgeReceiver,
    entries,
    failure,
    sms,
)
from watchstep_services.channels.receiver_file import RECEIVER

REGION = "eu-central-1"
ACCOUNT = "123456789012"


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Clients of an AWS with nothing in it."""
    for name, value in {
        "AWS_ENDPOINT_URL": moto_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    import httpx

    httpx.post(f"{moto_url}/moto-api/reset").raise_for_status()
    return lambda service: boto3.client(service, region_name=REGION)


def queue(aws: Any, name: str, **attributes: str) -> tuple[str, str]:
    """URL and ARN of a new queue."""
    url = aws("sqs").create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    return url, f"arn:aws:sqs:{REGION}:{ACCOUNT}:{name}"


def received(aws: Any, url: str) -> list[dict[str, Any]]:
    answer = aws("sqs").receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], AttributeNames=["All"]
    )
    return list(answer.get("Messages", []))


@pytest.mark.ci
def test_a_queue_gets_the_event(aws: Any) -> None:
    url, arn = queue(aws, "alerts")
    assert send({"kind": "sqs", "queue_arn": arn}, delivery_context()).result == "done"
    (message,) = received(aws, url)
    assert json.loads(message["Body"])["id"] == sample().id
    assert message["MessageAttributes"]["severity"]["StringValue"] == "critical"


@pytest.mark.ci
def test_a_fifo_queue_drops_what_comes_twice(aws: Any) -> None:
    url, arn = queue(aws, "alerts.fifo", FifoQueue="true")
    for _ in range(2):
        assert send({"kind": "sqs", "queue_arn": arn}, delivery_context()).result == "done"
    assert len(received(aws, url)) == 1


@pytest.mark.ci
def test_a_topic_tells_its_subscribers(aws: Any) -> None:
    url, arn = queue(aws, "subscriber")
    topic = aws("sns").create_topic(Name="alerts")["TopicArn"]
    aws("sns").subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn)
    assert (
        send({"kind": "sns", "topic_arn": topic, "title": "n\u00e4n\n{name}"}, delivery_context()).result
        == "done"
    )
    assert send({"kind": "sns", "topic_arn": topic, "content": "event"}, delivery_context()).result == "done"
    first, second = (json.loads(message["Body"]) for message in received(aws, url))
    assert first["Subject"] == "nan no-nans"
    assert "where   gradient/conv1.weight" in first["Message"]
    assert json.loads(second["Message"])["type"] == "io.watchstep.notification.firing"


def test_a_phone_gets_one_sms(aws: Any) -> None:
    config = {"kind": "sns", "phone_number": "+491701234567", "region": REGION, "title": "{message}"}
    assert send(config, delivery_context(), sample(message="\u00e9" + "[" * 300)).result == "done"


def test_the_length_of_an_sms() -> None:
    assert sms("short") == "short"
    assert sms("caf\u00e9 \U0001f600 `x`\x07y") == "cafe 'x' y"
    for text in ("x" * 500, "[" * 500, "a b " * 200):
        short = sms(text)
        assert len(short) + sum(short.count(double) for double in "[]{}\\^~|") <= MOST_SMS
        assert short.endswith("...")


def test_an_sms_has_the_link_where_enough_of_the_title_remains() -> None:
    link = "https://watch.example/projects/vision/runs/run-1/alerts/" + "f" * 32
    assert sms("short", link) == f"short {link}"
    both = sms("title " * 30, link)
    assert both.endswith(f"... {link}")
    assert len(both) <= MOST_SMS
    assert sms("short", link + "f" * 60) == "short"


def test_a_bus_gets_an_event_for_each_alert(aws: Any) -> None:
    url, arn = queue(aws, "target")
    events = aws("events")
    bus = events.create_event_bus(Name="ml")["EventBusArn"]
    pattern = {"detail": {"alert": {"severity": ["critical"]}}}
    events.put_rule(Name="all", EventBusName="ml", EventPattern=json.dumps(pattern))
    events.put_targets(Rule="all", EventBusName="ml", Targets=[{"Id": "q", "Arn": arn}])
    tried = send({"kind": "eventbridge", "bus_arn": bus}, delivery_context(), sample(alerts=12))
    assert (tried.result, tried.detail) == ("done", "events: 12 accepted")
    first = json.loads(received(aws, url)[0]["Body"])
    assert (first["source"], first["detail-type"]) == ("watchstep", "io.watchstep.alert.firing")
    assert first["detail"]["alert"]["labels"]["team"] == "vision"
    assert first["detail"]["id"] == "n-0001/f0"


class Bus:
    """A client whose bus does not take some entries at first."""

    def __init__(self, *codes: str) -> None:
        self.codes = list(codes)
        self.sent: list[int] = []

    def put_events(self, Entries: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: N803 - AWS's name
        self.sent.append(len(Entries))
        said = [{"EventId": "x"} for _ in Entries]
        if self.codes and (code := self.codes.pop(0)):
            said[0] = {"ErrorCode": code, "ErrorMessage": "m"}
        return {"FailedEntryCount": 1, "Entries": said}


@pytest.mark.parametrize(
    ("codes", "result", "sent"),
    [
        (["ThrottlingException"], "done", [3, 1]),
        (["ThrottlingException", "InternalFailure"], "error", [3, 1]),
        (["AccessDenied"], "failed", [3]),
    ],
)
def test_a_bus_that_takes_some(
    monkeypatch: pytest.MonkeyPatch, codes: list[str], result: str, sent: list[int]
) -> None:
    bus = Bus(*codes)
    monkeypatch.setattr("watchstep_services.channels.aws._client", lambda *_: bus)
    receiver = {"kind": "eventbridge", "bus_arn": f"arn:aws:events:{REGION}:{ACCOUNT}:event-bus/ml"}
    assert send(receiver, delivery_context(), sample(alerts=3)).result == result
    assert bus.sent == sent


def test_entries_are_small_enough() -> None:
    receiver = RECEIVER.validate_python(
        {"name": "r", "kind": "eventbridge", "bus_arn": f"arn:aws:events:{REGION}:{ACCOUNT}:event-bus/ml"}
    )
    assert isinstance(receiver, EventBridgeReceiver)
    (entry,) = entries(receiver, sample(message="x" * 400_000))
    assert len(entry["Detail"]) < 256_000


def test_a_role_is_assumed(aws: Any) -> None:
    url, arn = queue(aws, "theirs")
    role = {"role_arn": f"arn:aws:iam::{ACCOUNT}:role/watchstep", "external_id": "ext-1"}
    assert send({"kind": "sqs", "queue_arn": arn, **role}, delivery_context()).result == "done"
    assert len(received(aws, url)) == 1


def test_which_errors_are_final(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"kind": "sqs", "queue_arn": f"arn:aws:sqs:{REGION}:{ACCOUNT}:missing"}
    tried = send(missing, delivery_context())
    assert (tried.result, "NonExistentQueue" in tried.detail) == ("failed", True)
    for code, status, result in [
        ("Throttling", 400, "error"), ("InternalError", 500, "error"), ("Other", 503, "error"),
        ("KMSThrottlingException", 400, "error"), ("AuthorizationError", 403, "failed"), ("InvalidParameter", 400, "failed"),
    ]:  # fmt: skip
        response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        assert failure("sns", response).result == result
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert send(missing, delivery_context(seconds=3)).result == "error"


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "sns"}, {"kind": "sns", "topic_arn": "x"}, {"kind": "sns", "phone_number": "+491701234567"},
        {"kind": "sns", "phone_number": "0170", "region": REGION},
        {"kind": "sqs", "queue_arn": "https://sqs.eu-central-1.amazonaws.com/1/x"},
        {"kind": "sqs", "queue_arn": f"arn:aws:sqs:evil.example/:{ACCOUNT}:q"},
        {"kind": "eventbridge", "bus_arn": f"arn:aws:events:{REGION}:{ACCOUNT}:rule/x"},
        {"kind": "sqs", "queue_arn": f"arn:aws:sqs:{REGION}:{ACCOUNT}:q", "role_arn": "admin"},
    ],
)  # fmt: skip
def test_what_cannot_be_written(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RECEIVER.validate_python({"name": "r", **config})
