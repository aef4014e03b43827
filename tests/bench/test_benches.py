"""The benches run and print what they claim; how fast this machine is proves nothing here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(bench: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"bench.{bench}", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=100, check=True).stdout


def test_passthrough_compares_all_proxies_on_the_guests_own_bytes() -> None:
    page = run("passthrough", "--cards", "8", "--connections", "4", "--seconds", "0.6", "--rounds", "1")

    rows = ["gpu-host-proxy", "aiohttp, re-encodes", "aiohttp both sides"]
    if shutil.which("nginx"):
        rows.append("nginx")
    else:
        assert "nginx is not installed: its row is left out" in page
    for row in rows:
        found = re.search(rf"^  {row} +[0-9]+ +[0-9.]+ +(?:[0-9.]+|-) +[0-9.]+ +0$", page, re.MULTILINE)
        assert found, page
    assert re.search(r"goal: CPU a request at most 0.6 x aiohttp both sides: [0-9.]+, (met|MISSED)", page)


def test_isolation_compares_the_calls_beside_a_hung_guest_with_those_alone() -> None:
    page = run("isolation", "--rounds", "1", "--seconds", "0.5", "--hanging", "30")

    assert re.search(r"30 hanging callers got [0-9]+ time-outs and [0-9]+ times 'saturated'", page)
    assert re.search(r"goal: p99 beside at most 1.5 x alone: [0-9.]+, (met|MISSED)", page)


def test_storage_compares_the_store_with_bare_rows_on_both_databases() -> None:
    page = run("storage", "--rows", "2000", "--cards", "80", "--polls", "100", "--rounds", "2")

    for row in ("the store", "executemany", "SQLAlchemy", "COPY"):
        assert re.search(rf"^  {row} +[0-9]+ +[0-9.]+ +[0-9.]+ ", page, re.MULTILINE), page
    assert "SQLite, 2000 rows a side" in page
    assert "PostgreSQL, 2000 rows a side" in page
    goals = re.findall(r"goal: at (?:least|most) [^:]*: [0-9.e+]+, (?:met|MISSED)", page)
    assert len(goals) == 4, page
    assert re.search(r"the last 100 samples of a card: [0-9.]+ ms with 20[0-9]{2} hot rows", page)
