"""The sampler with real collector processes and a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuwire.device import GpuSnapshot
from guest_agent.collector_process import CollectorProcess
from guest_agent.gate import Gate
from guest_agent.sampler import IN_PROGRESS, NOT_YET, Sampler, Timing
from tests.fakes.sysfs import write_sysfs
from tests.guest_agent.test_collector_output import DEVICE, SAMPLE

TTL_S = 5.0
BACKOFF_S = 30.0


class Scripted:
    """A collector command that counts its runs and prints what the test put in place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sysfs = write_sysfs(folder / "sys", ["0000:01:00.0"])
        self.now = 1000.0
        self.print_sample()

    def print_sample(self, **changes: object) -> None:
        (self._folder / "output").write_text(json.dumps({**SAMPLE, **changes}) + "\n")

    def run_script(self, script: str) -> None:
        (self._folder / "script").write_text(script)

    @property
    def runs(self) -> int:
        log = self._folder / "runs"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @asynccontextmanager
    async def sampler(self, *, timeout_s: float = 5, rpc_deadline_s: float = 5) -> AsyncIterator[Sampler]:
        command = f"cd {self._folder}; echo run >> runs; [ -e script ] && . ./script; cat output"
        process = CollectorProcess(["sh", "-c", command], timeout_s)
        sampler = Sampler(Gate(self.sysfs), process, Timing(TTL_S, BACKOFF_S, rpc_deadline_s), clock=lambda: self.now)
        try:
            yield sampler
        finally:
            await sampler.close()


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_first_call_waits_for_the_first_sample(scripted: Scripted) -> None:
    async with scripted.sampler() as sampler:
        snapshot = await sampler.snapshot()

    assert [gpu.uuid for gpu in snapshot.gpus] == ["GPU-1"]
    assert snapshot.sample_age_ms == 0


async def test_a_burst_on_a_cold_cache_starts_one_collector(scripted: Scripted) -> None:
    async with scripted.sampler() as sampler:
        snapshots = await asyncio.gather(*(sampler.snapshot() for _ in range(100)))

    assert {len(s.gpus) for s in snapshots} == {1}
    assert scripted.runs == 1


async def test_nothing_samples_unless_someone_asks(scripted: Scripted) -> None:
    async with scripted.sampler():
        await asyncio.sleep(0.2)

    assert scripted.runs == 0


async def test_a_snapshot_within_its_ttl_is_served_with_its_age(scripted: Scripted) -> None:
    async with scripted.sampler() as sampler:
        await sampler.snapshot()
        scripted.now += TTL_S - 0.001
        snapshot = await sampler.snapshot()

    assert snapshot.sample_age_ms == 4999
    assert scripted.runs == 1


async def test_an_old_snapshot_is_served_while_a_new_one_is_taken_behind_it(scripted: Scripted) -> None:
    async with scripted.sampler() as sampler:
        await sampler.snapshot()
        scripted.now += 3600
        scripted.print_sample(gpus=[{**DEVICE, "temperature_c": 77}])

        old = await sampler.snapshot()
        assert (old.gpus[0].temperature_c, old.sample_age_ms) == (30, 3_600_000)
        await until(lambda: sampler.peek().gpus[0].temperature_c == 77)
        assert sampler.peek().sample_age_ms == 0


async def test_peeking_never_waits(scripted: Scripted) -> None:
    async with scripted.sampler() as sampler:
        assert sampler.peek() == GpuSnapshot(error=NOT_YET)
        await until(lambda: bool(sampler.peek().gpus))


async def test_a_slow_first_sample_is_in_progress_then_there_and_never_no_gpu(scripted: Scripted) -> None:
    scripted.run_script("until [ -e go ]; do sleep 0.01; done")
    async with scripted.sampler(rpc_deadline_s=0.1) as sampler:
        assert await sampler.snapshot() == GpuSnapshot(error=IN_PROGRESS)
        (scripted.sysfs.parent / "go").touch()
        await until(lambda: bool(sampler.peek().gpus))

    assert scripted.runs == 1


async def test_a_failed_sample_is_tried_again_after_the_backoff_and_not_before(scripted: Scripted) -> None:
    scripted.run_script("exit 1")
    async with scripted.sampler() as sampler:
        failed = await sampler.snapshot()
        assert failed == GpuSnapshot(error="the GPU collector exited with status 1")

        scripted.run_script("")
        scripted.now += BACKOFF_S - 0.001
        assert await sampler.snapshot() == failed
        assert scripted.runs == 1

        scripted.now += 0.001
        await sampler.snapshot()
        await until(lambda: bool(sampler.peek().gpus))
        assert scripted.runs == 2


async def test_an_nvml_error_is_a_failed_sample_too(scripted: Scripted) -> None:
    text = "failed to initialize NVML: Driver/library version mismatch"
    scripted.print_sample(gpus=[], error=text, cc_ready=None)
    async with scripted.sampler() as sampler:
        assert await sampler.snapshot() == GpuSnapshot(error=text)
        scripted.now += TTL_S
        await sampler.snapshot()
        await asyncio.sleep(0.1)

    assert scripted.runs == 1


async def test_a_failure_replaces_the_last_good_sample(scripted: Scripted) -> None:
    async with scripted.sampler() as sampler:
        await sampler.snapshot()
        scripted.run_script("echo no json; exit 0")
        scripted.now += TTL_S
        await sampler.snapshot()
        await until(lambda: not sampler.peek().gpus)
        assert sampler.peek().error.startswith("the GPU collector's output is unusable: not one line of JSON")
        assert sampler.peek().sample_age_ms is None


async def test_a_hung_collector_is_a_timeout(scripted: Scripted) -> None:
    scripted.run_script("exec sleep 60")
    async with scripted.sampler(timeout_s=0.2) as sampler:
        assert await sampler.snapshot() == GpuSnapshot(error="GPU sampling timed out")


async def test_without_a_driver_nothing_is_spawned_until_it_appears(scripted: Scripted) -> None:
    (scripted.sysfs / "module/nvidia").rmdir()
    async with scripted.sampler() as sampler:
        assert await sampler.snapshot() == GpuSnapshot(error="NVIDIA driver is not loaded")
        assert scripted.runs == 0
        (scripted.sysfs / "module/nvidia").mkdir()
        assert (await sampler.snapshot()).gpus


async def test_a_guest_without_a_card_never_spawns(scripted: Scripted, tmp_path: Path) -> None:
    scripted.sysfs = write_sysfs(tmp_path / "empty", [])
    async with scripted.sampler() as sampler:
        assert [await sampler.snapshot() for _ in range(1000)] == [GpuSnapshot()] * 1000

    assert scripted.runs == 0


async def test_a_failing_query_is_a_warning_once_and_what_cc_disables_never_is(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.print_sample(gpus=[{**DEVICE, "errors": ["power: Unknown Error", "utilization: Not Supported"]}])
    with caplog.at_level(logging.DEBUG, logger="guest_agent"):
        async with scripted.sampler() as sampler:
            await sampler.snapshot()
            scripted.now += TTL_S
            await sampler.snapshot()
            await until(lambda: sampler.peek().sample_age_ms == 0)

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["query failed: gpu=GPU-1 query=power reason=Unknown Error"]
    assert sum("query=utilization" in r.getMessage() for r in caplog.records) == 2


async def test_cards_that_pci_shows_and_nvml_does_not_are_an_error_and_never_no_gpu(scripted: Scripted) -> None:
    scripted.print_sample(gpus=[])
    async with scripted.sampler() as sampler:
        assert await sampler.snapshot() == GpuSnapshot(error="NVML counts no GPU, PCI shows 1")


async def test_what_a_failed_collector_said_is_in_the_log(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    scripted.run_script("echo the reason >&2; exit 1")
    with caplog.at_level(logging.WARNING):
        async with scripted.sampler() as sampler:
            await sampler.snapshot()

    assert "collector wrote to stderr: the reason" in caplog.text
