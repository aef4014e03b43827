"""The external port of a real agent: who sees what, and what GPU trouble costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import psutil
import pytest

from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs
from tests.processes import free_port, running


class Agent:
    def __init__(self, port: int, guest_port: int, pid: int, log: Path, control: Path) -> None:
        self._port = port
        self._guest_port = guest_port
        self.process = psutil.Process(pid)
        self.log = log
        self._control = control

    def set_nvml(self, text: str) -> None:
        new = self._control.with_suffix(".new")
        new.write_text(text)
        new.replace(self._control)

    def get(self, target: str, accept: str = "", *, guest: bool = False) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self._guest_port if guest else self._port, timeout=30)
        connection.request("GET", target, headers={"Accept": accept} if accept else {})
        reply: HTTPResponse = connection.getresponse()
        body = reply.read().decode()
        connection.close()
        return reply.status, body

    def gpu_info(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.get("/api/GpuInfo", guest=True)[1])
        return found


@contextmanager
def agent(
    folder: Path, *flags: str, app_compose: str | None = '{"public_sysinfo": true}', cards: int = 1, nvml: str = "devices = 1\n"
) -> Iterator[Agent]:
    (folder / "nvml.txt").write_text(nvml)
    if app_compose is not None:
        (folder / "app-compose.json").write_text(app_compose)
    sysfs = write_sysfs(folder / "sys", [f"0000:{number + 1:02x}:00.0" for number in range(cards)])
    port, guest_port = free_port(), free_port()
    listeners = ["--guest-api", f"127.0.0.1:{guest_port}", "--external", f"127.0.0.1:{port}", "--sysfs-root", str(sysfs)]
    files = ["--app-compose", f"{folder}/app-compose.json"]
    environment = fake_nvml_environment(build_fake_nvml(folder), folder / "nvml.txt")
    log = folder / "agent.log"
    with running("gpu-guest-agent", [*listeners, *files, *flags], log, environment) as process:
        yield Agent(port, guest_port, process.pid, log, folder / "nvml.txt")


def until(found: object, limit_s: float = 15) -> None:
    assert callable(found)
    deadline = time.monotonic() + limit_s
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_where_public_sysinfo_is_on_metrics_and_figures_are_shown(tmp_path: Path) -> None:
    with agent(tmp_path) as it:
        until(lambda: 'dstack_gpu_utilization_percent{index="0"' in it.get("/metrics")[1])
        status, page = it.get("/")
        assert (status, "W</td>" in page, "Uptime" in page) == (200, True, True)
        assert it.get("/metrics", "application/openmetrics-text")[1].endswith("# EOF\n")
        assert "dstack_guest_memory_total_bytes" in it.get("/metrics")[1]


@pytest.mark.parametrize(
    ("app_compose", "warning"),
    [
        ('{"public_sysinfo": false}', None),
        ("{}", None),
        (None, "No such file or directory"),
        ("no json", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"public_sysinfo": "yes"}', "neither true nor false"),
    ],
)
def test_where_it_is_off_no_figure_is_shown_anywhere(tmp_path: Path, app_compose: str | None, warning: str | None) -> None:
    with agent(tmp_path, app_compose=app_compose) as it:
        until(lambda: it.gpu_info()["gpus"])
        assert it.get("/metrics")[0] == 404
        status, page = it.get("/")
        assert (status, "App id" in page) == (200, True)
        for text in ("Uptime", "Memory", "GPU", "Kernel"):
            assert text not in page
        assert [it.get(target)[0] for target in ("/api/GpuInfo", "/api/SysInfo", "/elsewhere")] == [404, 404, 404]
    warnings = [line for line in it.log.read_text().splitlines() if " warning " in line]
    assert len(warnings) == (0 if warning is None else 1)
    assert warning is None or warning in warnings[0]
    assert warning is None or "app-compose.json" in warnings[0]


def test_a_guest_without_a_card_pays_nothing(tmp_path: Path) -> None:
    with agent(tmp_path, cards=0) as it:
        for _ in range(100):
            it.get("/metrics")
        before = it.process.memory_info().rss
        children: set[int] = set()
        for _ in range(1000):
            assert "dstack_gpu_nvml_up 1.0" in it.get("/metrics")[1]
            children |= {child.pid for child in it.process.children()}
        assert children == set()
        assert it.process.memory_info().rss - before < 2 * 2**20
        assert "No NVIDIA GPUs" in it.get("/")[1]


def test_a_hung_driver_costs_gpu_figures_and_nothing_else(tmp_path: Path) -> None:
    timing = ["--sample-timeout", "0.5", "--failure-backoff", "0.5", "--rpc-deadline", "0.2"]
    with agent(tmp_path, *timing, nvml="init = hang\n") as it:
        assert "GPU sample is not available yet" in it.get("/")[1]
        assert it.gpu_info()["error"] == "sampling in progress"
        assert "dstack_guest_uptime_seconds" in it.get("/metrics")[1]
        until(lambda: it.gpu_info()["error"] == "GPU sampling timed out")
        assert "dstack_gpu_nvml_up 0.0" in it.get("/metrics")[1]
        assert "GPU sampling timed out" in it.get("/")[1]
        until(lambda: it.process.children() == [])

        it.set_nvml("devices = 1\n")
        until(lambda: it.gpu_info()["gpus"])


def test_a_driver_that_appears_is_picked_up_and_one_that_vanishes_is_reported(tmp_path: Path) -> None:
    driver = tmp_path / "sys/module/nvidia"
    with agent(tmp_path) as it:
        until(lambda: it.gpu_info()["gpus"])
        driver.rmdir()
        assert it.gpu_info()["error"] == "NVIDIA driver is not loaded"
        assert "dstack_gpu_nvml_up 0.0" in it.get("/metrics")[1]
        driver.mkdir()
        assert it.gpu_info()["gpus"]


def test_a_library_that_is_mended_after_an_update_is_used_again(tmp_path: Path) -> None:
    with agent(tmp_path, "--failure-backoff", "0.3", nvml="init = error 18\n") as it:
        assert it.gpu_info()["error"] == "failed to initialize NVML: Driver/library version mismatch"
        it.set_nvml("devices = 1\n")
        until(lambda: it.gpu_info()["gpus"])
    assert "sampling again: gpus=1" in it.log.read_text()


def test_no_collector_outlives_the_agent(tmp_path: Path) -> None:
    with agent(tmp_path, "--rpc-deadline", "0.1", nvml="init = hang\n") as it:
        it.gpu_info()
        children = it.process.children(recursive=True)
        assert children
    assert psutil.wait_procs(children, 10)[1] == []
