"""`make demo` as a newcomer runs it: what it prints works, figures are live within 20 s, Ctrl-C ends everything."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.golden import ROOT


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running demo and what it printed, in a folder of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if "Ctrl-C" in line:
                break
        assert printed and "Ctrl-C" in printed[-1], printed
        yield process, "".join(printed)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_the_demo_shows_live_figures_and_ends_on_ctrl_c(demo: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    process, printed = demo
    children = psutil.Process(process.pid).children(recursive=True)

    deadline = time.monotonic() + 20
    with closing(sqlite3.connect(tmp_path / "demo-data/gpu-history.db")) as history:
        busy = "SELECT count(*) FROM v_gpu_samples WHERE utilization_gpu > 0"
        while (first := history.execute(busy).fetchone()[0]) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        while history.execute(busy).fetchone()[0] <= first:
            assert time.monotonic() < deadline + 10
            time.sleep(0.2)

    page_url = re.search(r"http://127\.0\.0\.1:\d+/", printed)
    assert page_url is not None
    page = urllib.request.urlopen(page_url[0]).read().decode()
    assert "Simulated cards, not real ones, in:" in page
    assert "serving (simulated)" in page

    sql = re.search(r"history in SQL {2}(.*)", printed)
    assert sql is not None
    assert "simulated" in run_as_printed(sql[1], tmp_path)
    curl = re.search(r"(curl .*)", printed)
    assert curl is not None
    if shutil.which("curl"):
        assert '"utilization_gpu":' in run_as_printed(curl[1], tmp_path)

    second = subprocess.run(
        [sys.executable, "-m", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (second.returncode, "another demo runs in this folder" in second.stderr) == (1, True)

    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert psutil.wait_procs(children, 10)[1] == []


def run_as_printed(command: str, folder: Path) -> str:
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
