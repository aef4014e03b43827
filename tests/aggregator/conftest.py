"""Each test that asks for a database runs on both kinds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aggregator.store import Store
from tests.postgres import copy_database, database_of, postgres_url, server_url

__all__ = ["postgres_url"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/history.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Iterator[Store]:
    """A store on an upgraded database. It writes at once how far each stay and stretch reaches."""
    if database_url.startswith("sqlite"):
        shutil.copy(request.getfixturevalue("upgraded_file"), tmp_path / "history.db")
    else:
        copy_database(server_url(request.config), request.getfixturevalue("upgraded_database"), database_url)
    with closing(Store(database_url, max_lag_s=0)) as store:
        store.require_current()
        yield store


# An upgrade takes a tenth of a second to some: it is done once, and copied for each test.


@pytest.fixture(scope="session")
def upgraded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("upgraded") / "history.db"
    _upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def upgraded_database(request: pytest.FixtureRequest) -> Iterator[str]:
    with database_of(server_url(request.config)) as url:
        _upgrade(url)
        yield url


def _upgrade(url: str) -> None:
    with closing(Store(url)) as store:
        store.upgrade()
