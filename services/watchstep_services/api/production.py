"""uvicorn's entry in production: ``uvicorn --factory watchstep_services.api.production:create``."""

from __future__ import annotations

from fastapi import FastAPI

from watchstep_services.api.app import create_app
from watchstep_services.database.schema import upgrade
from watchstep_services.scheduler.celery_app import app as celery
from watchstep_services.scheduler.production import production_service
from watchstep_services.settings import load_settings


def create() -> FastAPI:
    """The API of the production service; brings the schema up to date first.

    Raises:
        ConfigError: a setting is missing or cannot be used.
    """
    service = production_service(load_settings(), celery)
    upgrade(service.database)
    return create_app(service)
