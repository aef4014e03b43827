"""Each test that asks for a database runs on both kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.store import Store
from tests.postgres import postgres_url

__all__ = ["postgres_url"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/history.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """A store on an upgraded database. It writes at once how far each stay and stretch reaches."""
    store = Store(database_url, max_lag_s=0)
    store.require_current()
    yield store
    store.close()
