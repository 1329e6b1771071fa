"""Redis: whether it answers, and whether Celery may use it."""

from __future__ import annotations

import uuid
from urllib.parse import urlsplit

from watchstep_services.checks.finding import CheckFinding, failed
from watchstep_services.core.settings import Settings

_SECONDS = 5.0


def check_broker(settings: Settings) -> CheckFinding:
    """Push to a list and take from it, as Celery does."""
    url = settings.broker_url.get_secret_value()
    if not url:
        return CheckFinding("broker", "ok", "none: embedded")
    shown = _shown(url)
    try:
        import redis
    except ModuleNotFoundError as error:
        return failed("broker", error, "pip install 'watchstep[production]'")
    key = f"watchstep-probe-{uuid.uuid4().hex}"
    try:
        with redis.Redis.from_url(url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS) as client:
            client.lpush(key, "1")
            client.expire(key, 60)
            taken = client.brpop([key], timeout=int(_SECONDS))
    except (redis.RedisError, ValueError, OSError) as error:
        return failed(f"broker {shown}", error, "check WATCHSTEP_BROKER_URL and that Redis runs")
    if taken is None:
        return CheckFinding(
            f"broker {shown}", "failed", "what was pushed did not come back", "see Redis' memory policy"
        )
    return CheckFinding(f"broker {shown}", "ok", "pushes and takes")


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}{parts.path}"
