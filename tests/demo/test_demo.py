"""`make demo` as a newcomer runs it: what it prints works, figures are live within 20 s, Ctrl-C ends everything."""

from __future__ import annotations

import json
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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.golden import ROOT
from tests.needs import program_or_skip


@contextmanager
def running_demo(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running demo and what it printed, in a folder of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "demo", *flags],
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


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with running_demo(tmp_path) as running:
        yield running


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
    assert "choose 1h" in page
    card = re.search(r"one card's history {2}(http://.*)/\?view=card&uuid=(GPU-\S+)&range=1h\n", printed)
    assert card is not None
    assert urllib.request.urlopen(f"{card[1]}/api/v1/gpus?uuid={card[2]}").status == 200

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


def test_with_a_postgresql_and_a_prometheus_it_shows_an_alert_for_a_cvm_that_hangs(tmp_path: Path) -> None:
    program_or_skip("prometheus")
    with running_demo(tmp_path, "--postgres", "--prometheus") as (process, printed):
        children = psutil.Process(process.pid).children(recursive=True)
        assert "postgres" in {child.name() for child in children}
        # One that is gone is noticed sooner than one that hangs, whose answer is waited for.
        hang = re.search(r"kill -STOP (\d+) ", printed)
        assert hang is not None
        os.kill(int(hang[1]), signal.SIGKILL)
        other = next(child for child in children if "gpu-guest-agent" in " ".join(child.cmdline()))
        other.suspend()
        prometheus = re.search(r"its alerts +(http://127\.0\.0\.1:\d+)/alerts", printed)
        assert prometheus is not None
        found = asked(f"{prometheus[1]}/api/v1/rules?type=alert")["groups"]
        waits = {rule["name"]: rule["duration"] for group in found for rule in group["rules"]}
        assert (waits["GpuCvmSilent"], waits["GpuIdle"]) == (60, 1800)
        deadline = time.monotonic() + 60
        while True:
            alerts = asked(f"{prometheus[1]}/api/v1/alerts")["alerts"]
            if any(alert["labels"].get("vm_name") == "serving (simulated)" for alert in alerts):
                break
            assert time.monotonic() < deadline, alerts
            time.sleep(0.3)
        sql = re.search(r"history in SQL {2}(.*)", printed)
        assert sql is not None
        assert "simulated" in run_as_printed(sql[1], tmp_path)

        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert psutil.wait_procs(children, 10)[1] == []


def asked(url: str) -> Any:
    """What Prometheus answers."""
    return json.loads(urllib.request.urlopen(url).read())["data"]


def run_as_printed(command: str, folder: Path) -> str:
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
