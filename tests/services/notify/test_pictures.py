"""Pictures in notifications: what they show, when they are left out, and that no notification is lost for one."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import update

from tests.sdk.format.blocks import Row
from tests.services.channels.http_server import HttpServer, http_server
from tests.services.channels.smtp_server import smtp_server
from tests.services.driving import Driven
from tests.services.notify.alerting import (
    EXPLODES,
    LAST,
    PUBLIC,
    exploding,
    fire,
    picture_name,
    reachable,
    with_receiver,
)
from tests.services.recording import LAYERS, nan_from
from watchstep.errors import NotFoundError, StoreError
from watchstep.plots.alert_evidence import AlertEvidence
from watchstep.reading.budget import ReadBudget
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.models import AlertInstanceRow, RunRow
from watchstep_services.notify import pictures, samples
from watchstep_services.notify.flush import flush_due
from watchstep_services.notify.pictures import (
    PictureThreads,
    draw_picture,
    find_alert_to_draw,
    opened_run,
    picture_for,
    read_evidence,
)

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def mail_to(port: int) -> dict[str, Any]:
    return {
        "kind": "email", "host": "127.0.0.1", "port": port, "security": "none", "sender": "w@ml.example", "to": ["a@ml.example"],
    }  # fmt: skip


def evidence(driven: Driven) -> AlertEvidence:
    with driven.service.database.read() as session:
        alert = find_alert_to_draw(session, picture_name(driven))
    with opened_run(driven.service, alert) as run:
        return read_evidence(run, alert)


def sent(driven: Driven) -> tuple[str, str]:
    (action,) = flush_due(driven.service)
    row = driven.finish(action)
    return row.state, row.outcome


def test_the_series_is_the_one_that_the_rule_compared(driven_sqlite: Driven) -> None:
    fire(driven_sqlite)
    shown = evidence(driven_sqlite)
    assert (shown.rule, shown.run, shown.tensor) == ("mine", "run-1", "second.weight:gradient")
    assert shown.step == EXPLODES
    assert shown.figure == "mean"  # of one element
    assert list(shown.steps) == list(range(LAST + 1))
    at_step = shown.values[shown.steps.index(EXPLODES)]
    assert isinstance(shown.thresholds, float)
    assert at_step is not None
    assert shown.thresholds < at_step
    assert shown.stopped_at is None


def test_of_a_matrix_it_is_the_figure_with_the_findings_value(driven_sqlite: Driven) -> None:
    driven = Driven(replace(driven_sqlite.service, owner_rules=()))
    recording, run_id = driven.begin(rules=[RuleConfig.model_validate({"rule": "exploding_gradient"})])
    rows = [
        Row(step, info, [exploding(step, info.name) * part for part in (3.0, -4.0)])
        for step in range(LAST + 1)
        for info in LAYERS
    ]
    driven.judge(run_id, recording.write_rows(0, rows))
    shown = evidence(driven)
    assert shown.figure == "l2"
    assert shown.values[0] == 5.0
    assert isinstance(shown.thresholds, float)
    assert shown.usual_range is None  # of rms and abs_max, not of the norm


def test_a_loss_that_is_not_a_number_is_marked(driven_sqlite: Driven) -> None:
    fire(driven_sqlite, nan_from(40), "non_finite_values")
    shown = evidence(driven_sqlite)
    assert (shown.tensor, shown.step) == ("loss", 40)
    values = dict(zip(shown.steps, shown.values, strict=True))
    assert values[39] == 1.0
    assert values[40] != values[40]


def test_a_step_that_a_later_attempt_repeated_has_no_picture(driven_sqlite: Driven) -> None:
    fire(driven_sqlite)
    again = driven_sqlite.recording(attempt="a2").begin(started_ns=2)
    again.write(0, EXPLODES - 5, LAST, taken_ns=10**12)
    with pytest.raises(NotFoundError, match="later attempt"):
        evidence(driven_sqlite)


def test_an_alert_about_no_tensor_has_no_picture(driven_sqlite: Driven) -> None:
    fire(driven_sqlite)
    with driven_sqlite.service.database.write() as session:
        (row,) = session.query(AlertInstanceRow)
        row.finding = {**row.finding, "tensor": ""}
    with driven_sqlite.service.database.read() as session, pytest.raises(NotFoundError, match="no tensor"):
        find_alert_to_draw(session, picture_name(driven_sqlite))


@pytest.mark.ci
def test_a_mail_carries_the_picture(driven_sqlite: Driven) -> None:
    with smtp_server() as smtp:
        driven = with_receiver(driven_sqlite.with_settings(picture_seconds=60.0), mail_to(smtp.port))
        fire(driven)
        assert sent(driven)[0] == "done"
    (mail,) = smtp.messages
    (image,) = [part for part in mail.walk() if part.get_content_type() == "image/png"]
    assert image.get_content().startswith(PNG)
    body = mail.get_body(("html",))
    assert body is not None
    assert "second.weight:gradient around step 60" in body.get_content()
    assert "href" not in body.get_content()  # no public URL, no link


def test_slack_gets_a_signed_link(
    driven_sqlite: Driven,
    server: HttpServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WATCHSTEP_RECEIVER_SLACK", server.url)
    driven = reachable(driven_sqlite, tmp_path, allowed_addresses="loopback")
    driven = with_receiver(driven, {"kind": "slack", "url": {"env": "WATCHSTEP_RECEIVER_SLACK"}})
    run_id = fire(driven)
    assert sent(driven)[0] == "done"
    import json

    _, shown = json.loads(server.bodies[0])["attachments"]
    link = urlsplit(shown["image_url"])
    name = picture_name(driven)
    assert f"{link.scheme}://{link.netloc}" == PUBLIC
    assert link.path == f"/v1/projects/vision/runs/run-1/alerts/{name.fingerprint}/picture.png"
    query = parse_qs(link.query)
    assert set(query) == {"expires", "signature"}
    assert shown["title_link"] == f"{PUBLIC}/projects/vision/runs/run-1/alerts/{name.fingerprint}"
    # Neither the outbox nor the record of tries has the signature.
    (action,) = driven.actions(run_id, "notify")
    assert query["signature"][0] not in json.dumps(action.payload) + action.outcome


@pytest.mark.parametrize(
    "settings",
    [
        {"public_url": ""},
        {"picture_link_hours": 0.0},
        {"picture_seconds": 0.0},
        {"secret_key": None, "database_url": "x"},
    ],
)
def test_there_is_no_link_without_a_public_url_a_key_or_by_setting(
    driven_sqlite: Driven,
    server: HttpServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    from pydantic import SecretStr

    if "database_url" in settings:
        settings = {**settings, "database_url": SecretStr(settings["database_url"])}
    monkeypatch.setenv("WATCHSTEP_RECEIVER_SLACK", server.url)
    driven = reachable(driven_sqlite, tmp_path, allowed_addresses="loopback", **settings)
    driven = with_receiver(driven, {"kind": "slack", "url": {"env": "WATCHSTEP_RECEIVER_SLACK"}})
    fire(driven)
    assert sent(driven)[0] == "done"
    assert b"image_url" not in server.bodies[0]
    assert (b"Open the alert" in server.bodies[0]) is bool(driven.service.settings.public_url)


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["store", "drawing", "database", "rows"])
def test_no_notification_is_lost_because_a_picture_fails(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(*_arguments: Any, **_named: Any) -> Any:
        raise {
            "store": StoreError("store: no answer", "wait"),
            "drawing": ValueError("bad"),
            "database": OSError("gone"),
        }[fault]

    with smtp_server() as smtp:
        driven = with_receiver(driven_sqlite, mail_to(smtp.port))
        run_id = fire(driven)
        if fault == "rows":
            shutil.rmtree(Path(folder_store.location) / "vision" / "run-1" / "stats")
        else:
            name = {"store": "read_evidence", "drawing": "alert_png", "database": "find_alert_to_draw"}[fault]
            monkeypatch.setattr(pictures, name, fail)
        assert sent(driven)[0] == "done"
        assert [outcome for outcome, *_ in driven.tries(driven.actions(run_id)[-1].id)] == ["done"]
    (mail,) = smtp.messages
    assert mail.get_content_type() == "multipart/alternative"


def test_a_notification_does_not_wait_for_a_picture_that_takes_long(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def hang(*_arguments: Any) -> bytes:
        over.wait(60)
        return PNG

    monkeypatch.setattr(pictures, "alert_png", hang)
    monkeypatch.setattr(pictures, "_threads", functools.cache(PictureThreads))
    # Reading has a limit of its own, which is not the one of this test.
    monkeypatch.setattr(pictures, "ReadBudget", lambda _seconds, megabytes: ReadBudget(3600.0, megabytes))
    with smtp_server() as smtp:
        driven = with_receiver(driven_sqlite.with_settings(picture_seconds=0.05), mail_to(smtp.port))
        fire(driven)
        try:
            assert sent(driven)[0] == "done"
            # While it still takes long, others do not wait at all.
            made = samples.example(driven.service, "vision", "firing", 1)
            first = replace(made.alerts[0], fingerprint=picture_name(driven).fingerprint)
            first = replace(first, labels={**first.labels, "run": "run-1"})
            patient = driven.with_settings(picture_seconds=3600.0).service
            made = replace(made, alerts=(first,))
            assert picture_for(patient, driven.service.receiver_file.receivers[0], made, 1) is None
        finally:
            over.set()
    (mail,) = smtp.messages
    assert mail.get_content_type() == "multipart/alternative"


def test_threads_for_pictures_serve_again_after_one_that_took_long() -> None:
    threads, over = PictureThreads(), threading.Event()

    def hang() -> bytes:
        over.wait(60)
        return PNG

    assert threads.draw("a", hang, 0.01) is None
    assert threads.draw("a", lambda: PNG, 3600) is None
    assert threads.draw("b", lambda: PNG, 60) == PNG
    over.set()
    while threads.draw("a", lambda: PNG, 60) is None:
        pass


def test_no_transaction_is_open_while_a_picture_is_drawn(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    with smtp_server() as smtp:
        driven = with_receiver(driven_sqlite.with_settings(picture_seconds=60.0), mail_to(smtp.port))
        run_id = fire(driven)
        open_sessions: list[int] = []

        def drawn(_evidence: AlertEvidence) -> bytes:
            pool: Any = driven.service.database.engine.pool
            open_sessions.append(pool.checkedout())
            with driven.service.database.write() as session:  # another writer does not wait
                session.execute(update(RunRow).where(RunRow.id == run_id).values(due_ns=None))
            return PNG

        monkeypatch.setattr(pictures, "alert_png", drawn)
        assert sent(driven)[0] == "done"
    assert open_sessions == [0]


def test_a_picture_is_drawn_once_for_all_receivers_and_anew_after_a_change(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    fire(driven_sqlite)
    drawn: list[AlertEvidence] = []

    def draw(given: AlertEvidence) -> bytes:
        drawn.append(given)
        return PNG

    monkeypatch.setattr(pictures, "alert_png", draw)
    service = driven_sqlite.service
    with service.database.read() as session:
        alert = find_alert_to_draw(session, picture_name(driven_sqlite))
    for changed in (alert, alert, replace(alert, event_id="later")):
        assert draw_picture(service, changed, lambda: opened_run(service, alert)) == PNG
    assert len(drawn) == 2


def test_values_of_every_size_can_be_drawn(driven_sqlite: Driven) -> None:
    fire(driven_sqlite, lambda step, name: exploding(step, name) * 1e30)
    service = driven_sqlite.service
    with service.database.read() as session:
        alert = find_alert_to_draw(session, picture_name(driven_sqlite))
    assert draw_picture(service, alert, lambda: opened_run(service, alert)).startswith(PNG)
