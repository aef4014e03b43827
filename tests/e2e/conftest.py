"""The whole way for the end-to-end tests: both databases, and a host with its agents and proxy running."""

from __future__ import annotations

from tests.aggregator.conftest import database_url
from tests.postgres import postgres_url

__all__ = ["database_url", "postgres_url"]
