"""What SysInfo answers: this guest's system, memory, load and data disks. Blocking: a dead mount may hang it."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from gpuwire.pb.guest_api_pb2 import DiskInfo, SystemInfo
from guest_agent.fit import fit

log = logging.getLogger(__name__)

_left_out: set[Path] = set()  # data disks that a warning has named: one a path, however often they are asked for


def read_system_info(data_disks: Sequence[Path], *, cpuinfo: Path = Path("/proc/cpuinfo")) -> SystemInfo:
    """Sizes in bytes, loads times 100. A text without a source is empty, a data disk that cannot be read is left out.

    OSError from psutil's own files in /proc passes through.
    """
    os_release = _read_os_release()
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    load_one, load_five, load_fifteen = psutil.getloadavg()
    return fit(
        SystemInfo,
        os_name=os_release.get("NAME", ""),
        os_version=os_release.get("VERSION_ID", ""),
        kernel_version=os.uname().release,
        cpu_model=_read_cpu_model(cpuinfo),
        num_cpus=psutil.cpu_count() or 0,
        total_memory=memory.total,
        available_memory=memory.available,
        # Not psutil's `used`, which older versions count in another way: the cache is in it or not.
        used_memory=memory.total - memory.available,
        free_memory=memory.free,
        total_swap=swap.total,
        used_swap=swap.used,
        free_swap=swap.free,
        # Not the time since psutil's boot_time(): that is a date, and moves when the clock is set.
        uptime=int(time.clock_gettime(time.CLOCK_BOOTTIME)),
        loadavg_one=load_one * 100,
        loadavg_five=load_five * 100,
        loadavg_fifteen=load_fifteen * 100,
        disks=_read_disks(data_disks),
    )


def parse_cpu_model(lines: Iterable[str]) -> str:
    """The first "model name" of /proc/cpuinfo; empty where there is none (ARM). Stops there: the file is long."""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""


def find_device(path: str, mounts: Sequence[tuple[str, str]]) -> str:
    """The device that holds the absolute `path`, among `mounts` (device, mount point) in the order of mounting."""
    holders = [(device, point) for device, point in mounts if Path(path).is_relative_to(point)]
    # Reversed, because of mounts on one point the last covers the others.
    device, _ = max(reversed(holders), key=lambda mount: len(mount[1]), default=("", ""))
    return device


def _read_os_release() -> Mapping[str, str]:
    try:
        return platform.freedesktop_os_release()
    except (OSError, ValueError):  # absent; not UTF-8
        return {}


def _read_cpu_model(cpuinfo: Path) -> str:
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            return parse_cpu_model(file)
    except OSError:
        return ""


def _read_disks(data_disks: Sequence[Path]) -> Iterator[DiskInfo]:
    mounts = [(mount.device, mount.mountpoint) for mount in psutil.disk_partitions(all=True)] if data_disks else []
    for disk in dict.fromkeys(data_disks):
        try:
            usage = psutil.disk_usage(str(disk))
        except OSError as error:
            if disk not in _left_out:
                _left_out.add(disk)
                log.warning("data disk left out: path=%s reason=%s", disk, error.strerror)
            continue
        yield fit(
            DiskInfo,
            name=find_device(os.path.realpath(disk), mounts),
            mount_point=str(disk),
            total_size=usage.total,
            free_size=usage.free,
        )
