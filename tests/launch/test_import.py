"""The launching side works where the service is not installed."""

from __future__ import annotations

import subprocess
import sys

SERVER = (
    "alembic", "cryptography", "fastapi", "httpcore", "httpx", "limits", "prometheus_client", "psutil",
    "pydantic_settings", "sqlalchemy", "typer", "uvicorn", "celery", "psycopg", "redis", "starlette",
)  # fmt: skip
OF_BACKENDS = ("boto3", "kubernetes", "ray", "torch")

_BLOCKED = """
import importlib, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
import watchstep_launch as estimator
for module in pkgutil.walk_packages(estimator.__path__, estimator.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:  # the part of a backend that is imported when it is first used
        if (error.name or "").partition(".")[0] not in {of_backends!r}:
            raise
for name in estimator.__all__:
    getattr(estimator, name)
del sys.modules["typer"]  # with the launching side's commands
importlib.import_module("watchstep_services.cli.jobs")
"""


def test_every_module_of_the_launching_side_imports_without_the_server() -> None:
    program = _BLOCKED.format(blocked=(*SERVER, *OF_BACKENDS), of_backends=OF_BACKENDS)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
