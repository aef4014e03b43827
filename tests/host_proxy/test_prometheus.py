"""A real Prometheus finds the VMs through /sd, scrapes their pages, and has no complaint about any page of ours."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs
from tests.needs import program_or_skip
from tests.processes import free_port, running

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: gpu-host-proxy
    static_configs: [{{targets: ["127.0.0.1:{proxy}"]}}]
  - job_name: gpu-guests
    http_sd_configs: [{{url: "http://127.0.0.1:{proxy}/sd", refresh_interval: 1s}}]
    relabel_configs:
      - {{source_labels: [__meta_gpu_vm_name], target_label: vm_name}}
      - {{source_labels: [__param_id], target_label: instance}}
"""


@pytest.fixture
def proxy(short_dir: Path) -> Iterator[int]:
    """The port of a proxy in front of a real agent, and of a VM without one."""
    (short_dir / "nvml.txt").write_text("devices = 1\n0.utilization = 42 10\n")
    environment = fake_nvml_environment(build_fake_nvml(short_dir), short_dir / "nvml.txt")
    sysfs = write_sysfs(short_dir / "sys", ["0000:01:00.0"])
    listeners = ["--guest-api", f"unix:{short_dir}/g.sock", "--external", f"unix:{short_dir}/x.sock"]
    (short_dir / "vms.toml").write_text(
        f'[[vm]]\nid = "vm-1"\nname = "training"\nguest = "unix:{short_dir}/g.sock"\ngpus = ["19:00.0"]\n'
        f'[[vm]]\nid = "vm-2"\nguest = "unix:{short_dir}/nobody.sock"\n'
    )
    port = free_port()
    with (
        running("gpu-guest-agent", [*listeners, "--sysfs-root", str(sysfs)], short_dir / "agent.log", environment),
        running(
            "gpu-host-proxy",
            ["--listen", f"127.0.0.1:{port}", "--vms", f"{short_dir}/vms.toml"],
            short_dir / "proxy.log",
        ),
    ):
        yield port


def query(port: int, text: str) -> dict[str, float]:
    """Values by the `instance` label."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
    with suppress(OSError):
        result: list[dict[str, Any]] = json.load(urllib.request.urlopen(url))["data"]["result"]
        return {entry["metric"]["instance"]: float(entry["value"][1]) for entry in result}
    return {}


def test_prometheus_discovers_scrapes_and_joins(proxy: int, tmp_path: Path) -> None:
    prometheus = program_or_skip("prometheus")
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(proxy=proxy))
    port = free_port()
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([prometheus, *flags, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while query(port, 'dstack_gpu_utilization_percent{host_bdf="0000:19:00.0",vm_name="training"}') != {"vm-1": 42}:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.2)
        while query(port, "dstack_gpu_probe_success") != {"vm-1": 1, "vm-2": 0}:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        while query(port, 'gpu_host_proxy_vms{source="vms"}') != {f"127.0.0.1:{proxy}": 2}:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert query(port, 'up{job="gpu-guests"}') == {"vm-1": 1, "vm-2": 1}
    finally:
        server.terminate()
        server.wait(15)


@pytest.mark.parametrize("target", ["/metrics", "/guest-metrics?id=vm-1", "/guest-metrics?id=vm-2"])
def test_promtool_has_no_complaint(proxy: int, target: str) -> None:
    promtool = program_or_skip("promtool")
    page = urllib.request.urlopen(f"http://127.0.0.1:{proxy}{target}").read()
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)

    assert (done.returncode, done.stderr.decode(), done.stdout.decode()) == (0, "", "")
