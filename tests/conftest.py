"""Fixtures of more than one room."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder with a short name: the path of a Unix socket ends at 107 bytes, and pytest's own folders are deep."""
    with tempfile.TemporaryDirectory(prefix="gpu-", dir="/tmp") as path:
        yield Path(path)
