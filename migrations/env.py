"""Run by alembic for each command. The program hands over its own connection, with the transaction it is in; `make migration`
comes through alembic.ini, with an address."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, MetaData, create_engine

from aggregator.tables import metadata, sqlite_metadata


def _metadata(connection: Connection) -> list[MetaData]:
    return [metadata, *([sqlite_metadata] if connection.dialect.name == "sqlite" else [])]


def migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=_metadata(connection))
    with context.begin_transaction():
        context.run_migrations()


if (given := context.config.attributes.get("connection")) is not None:
    migrate(given)
else:
    with create_engine(context.config.get_main_option("sqlalchemy.url", "")).begin() as own:
        migrate(own)
