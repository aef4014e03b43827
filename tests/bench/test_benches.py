"""The benches run and print what they claim; how fast this machine is proves nothing here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from aggregator.reports import reports
from aggregator.store import Store
from bench import reports as bench_reports
from tests.aggregator.conftest import database_url
from tests.aggregator.fleets import T0, H, fill, roll_up
from tests.postgres import postgres_url

__all__ = ["database_url", "postgres_url"]

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


def test_reports_puts_each_answer_beside_a_floor(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Store(database_url)) as store:
        store.require_current()
        fill(store, T0, T0 + 2 * H)
        roll_up(store, T0 + H)
        bench_reports.measure(store, 1)
    page = capsys.readouterr().out

    answers = ["history of a card, 24 h at 5 min", "gpus", "summary, 24 h", "heatmap, 24 h at 15 min"]
    for name, report in reports().items():
        answers += [
            f"{name}{by}, {span}"
            for by in (" by=gpu", " by=day") * ("by" in report.parameters) or ("",)
            for span in ("24 h", "7 d")
        ]
    found = re.findall(r"^(.+?) +[0-9.]+ ms +[0-9.]+ ms +[0-9.]+$", page, re.MULTILINE)
    assert found == answers
