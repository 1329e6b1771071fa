from tests.service_fixtures import (  # noqa: F401 - fixtures
    _no_settings_from_outside,
    database,
    driven,
    driven_sqlite,
    empty_database,
    postgres,
    postgres_tables,
    sqlite,
    sqlite_factory,
    sqlite_tables,
)
