"""A guest for the golden pages, made by hand: one healthy card, one that fails in part, in another domain, one that is lost."""

from __future__ import annotations

from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.metrics import expose
from gpuwire.pb.guest_api_pb2 import DiskInfo, GuestInfo, SystemInfo
from guest_agent.dashboard import Figures, render_dashboard
from guest_agent.metrics import gpu_families, system_families

SNAPSHOT = GpuSnapshot(
    gpus=(
        GpuDevice(
            index=0,
            uuid="GPU-5f0c1e52-0000-4000-8000-000000000001",
            pci_bus_id="00000000:01:00.0",
            utilization_gpu=97,
            utilization_memory=0,
            memory_total_bytes=150754820096,
            memory_used_bytes=21474836480,
            memory_free_bytes=129279983616,
            temperature_c=35,
            power_usage_mw=70123,
        ),
        GpuDevice(
            index=1,
            uuid="GPU-5f0c1e52-0000-4000-8000-000000000002",
            pci_bus_id="00010000:02:00.0",
            utilization_gpu=0,
            memory_total_bytes=150754820096,
            errors=("temperature: Not Supported", "power: Not Supported"),
        ),
        GpuDevice(index=2, errors=("device: GPU is lost",)),
    ),
    cc_ready=True,
    sample_age_ms=2512,
)

SYSTEM = SystemInfo(
    os_name="DStack",
    os_version="0.5.4",
    kernel_version="6.9.0-dstack",
    cpu_model="INTEL(R) XEON(R) PLATINUM 8568Y+",
    num_cpus=24,
    total_memory=64 * 2**30,
    available_memory=48 * 2**30,
    used_memory=15 * 2**30,
    free_memory=40 * 2**30,
    total_swap=0,
    uptime=90061,
    loadavg_one=40,
    loadavg_five=125,
    loadavg_fifteen=3,
    disks=[
        DiskInfo(name="/dev/vda", mount_point="/", total_size=400 * 2**30, free_size=300 * 2**30),
        DiskInfo(name="none", mount_point="/empty"),
    ],
)

GUEST = GuestInfo(version="1.2.3", app_id=bytes.fromhex("a1b2c3"), instance_id=bytes.fromhex("d4e5f6"))


def metrics_page(accept: str) -> str:
    return expose([*gpu_families(SNAPSHOT), *system_families(SYSTEM)], accept)[0].decode()


def dashboard_page() -> str:
    return render_dashboard(GUEST, Figures(SYSTEM, SNAPSHOT))
