"""Programs that some tests need and a machine may lack: without them the test is skipped with the reason; in CI it fails."""

from __future__ import annotations

import os
import shutil

import pytest


def program_or_skip(name: str) -> str:
    """The path of a program that is not ours to bring."""
    path = shutil.which(name)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed")
    return path
