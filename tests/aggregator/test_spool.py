from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.errors import SpoolFull
from aggregator.rows import Cvm, Poll, Sample
from aggregator.spool import SET_ASIDE, Mark, Spool
from gpuwire.bdf import Bdf
from gpuwire.device import GAUGES, GpuDevice
from gpuwire.errors import StartError
from gpuwire.placement import HostAddress
from tests.small_disk import small_disk

__all__ = ["small_disk"]

T0 = 1_790_000_000_000


def poll(number: int, **more: object) -> Poll:
    return Poll(Cvm("rack1", f"vm-{number}"), T0 + number, "ok", **more)  # type: ignore[arg-type]


def polls(*numbers: int) -> list[Poll]:
    return [poll(number) for number in numbers]


def drain(spool: Spool, limit: int = 100) -> list[int]:
    """Everything that waits, by number, read and forgotten."""
    found: list[int] = []
    while True:
        batch, end = spool.read(limit)
        if not batch:
            return found
        found += [one.polled_at_ms - T0 for one in batch]
        spool.forget(end)


def segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.jsonl") if path.name != SET_ASIDE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def spool(folder: Path) -> Iterator[Spool]:
    with closing(Spool(folder)) as spool:
        yield spool


# The folder


def test_folder_that_is_taken_away_is_made_again(folder: Path, spool: Spool) -> None:
    spool.append(polls(1, 2))
    shutil.rmtree(folder)
    spool.append(polls(3))
    assert drain(spool) == [3]
    assert spool.damaged == 2
    folder.rename(folder.with_name("elsewhere"))
    spool.append(polls(4))
    with pytest.raises(StartError, match="is in use by another program"):
        Spool(folder)
    assert drain(spool) == [4]


def test_trying_it_leaves_nothing_and_tells_what_keeps_it_from_taking_polls(folder: Path, spool: Spool) -> None:
    spool.append([])
    assert (spool.stock.polls, segments(folder)) == (0, [])
    spool.append(polls(1))
    spool.append([])
    assert drain(spool) == [1]
    shutil.rmtree(folder)
    folder.write_text("in its place")
    with pytest.raises(SpoolFull, match=r"mend what keeps it from that: .*spool: Not a directory$"):
        spool.append([])


def test_folder_named_like_a_segment_is_named_at_start(folder: Path) -> None:
    (folder / "0000000000000099.jsonl").mkdir(parents=True)
    with pytest.raises(StartError, match=r"0000000000000099\.jsonl: Is a directory"):
        Spool(folder)


# In and out

texts = st.text(st.characters(), max_size=8)
counts = st.none() | st.integers(0, 2**64)
bdfs = st.builds(Bdf, st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
devices = st.builds(
    GpuDevice,
    st.integers(0, 2**32 - 1),
    texts,
    texts,
    **{gauge.name: counts for gauge in GAUGES},
    errors=st.lists(texts, max_size=2).map(tuple),
)
samples = st.builds(
    Sample, devices, st.integers(), st.none() | bdfs, st.none() | st.builds(HostAddress, bdfs, texts), st.none() | texts
)
any_polls = st.builds(
    Poll,
    st.builds(Cvm, texts, texts, texts, texts, texts),
    st.integers(),
    texts,
    texts,
    texts,
    st.none() | st.booleans(),
    st.none() | st.booleans(),
    st.lists(samples, max_size=2).map(tuple),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(any_polls, min_size=1, max_size=3))
def test_poll_comes_out_as_it_went_in(spool: Spool, given: list[Poll]) -> None:
    end = spool.append(given)
    assert spool.read(10) == (given, end)
    spool.forget(end)


def test_polls_come_in_order_and_again_until_they_are_forgotten(spool: Spool, folder: Path) -> None:
    for number in range(5):
        spool.append(polls(number))
    first, end = spool.read(2)
    assert spool.read(2) == (first, end) == (polls(0, 1), end)
    spool.forget(end)
    assert (spool.stock.polls, spool.stock.batches, spool.stock.oldest_ms) == (3, 3, T0 + 2)
    assert drain(spool, 2) == [2, 3, 4]
    assert spool.stock == (0, 0, 0, None)
    assert segments(folder) == []


def test_what_an_earlier_run_left_comes_first(folder: Path) -> None:
    for number in range(3):
        with closing(Spool(folder)) as earlier:
            earlier.append(polls(number))
    with closing(Spool(folder)) as spool:
        assert spool.stock[:2] == (3, 3)
        assert spool.holds_earlier
        spool.append(polls(3))
        assert spool.read(100)[0] == polls(0), "never of two runs at once"
        assert drain(spool) == [0, 1, 2, 3]
        assert not spool.holds_earlier


def test_what_is_forgotten_does_not_come_in_the_next_run(folder: Path) -> None:
    with closing(Spool(folder, segment_bytes=1)) as spool:
        for number in range(4):
            spool.append(polls(2 * number, 2 * number + 1))
        spool.forget(spool.read(2)[1])
        spool.forget(spool.read(1)[1])
        assert len(segments(folder)) == 3
    with closing(Spool(folder)) as spool:
        assert spool.stock[:2] == (5, 3)
        assert spool.stock.oldest_ms == T0 + 3
        assert drain(spool) == [3, 4, 5, 6, 7]
        assert segments(folder) == []
    assert (folder / "lock").read_bytes() == b""


def test_killed_program_writes_nothing_again_but_the_batch_on_its_way(folder: Path) -> None:
    """Of samples that came too late for their bucket only the sums are left: written again they would count twice."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from aggregator.spool import Spool; from tests.aggregator.test_spool import polls\n"
        "spool = Spool(Path(sys.argv[1])); spool.append(polls(*range(6)))\n"
        "spool.forget(spool.read(2)[1]); spool.forget(spool.read(2)[1]); spool.read(2); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    with closing(Spool(folder)) as spool:
        assert drain(spool) == [4, 5]


@pytest.mark.parametrize("change", ["copied", "earlier one", "shorter", "note of old"])
def test_how_far_one_file_is_committed_is_not_taken_of_another(folder: Path, change: str) -> None:
    with closing(Spool(folder)) as spool:
        spool.append(polls(*range(4)))
        spool.forget(spool.read(2)[1])
    (segment,) = segments(folder)
    if change == "copied":
        shutil.copy(segment, folder / "copy")
        (folder / "copy").rename(segment)
        expected = [0, 1, 2, 3]
    elif change == "earlier one":
        shutil.copy(segment, folder / "0.jsonl")
        expected = [0, 1, 2, 3, 0, 1, 2, 3]
    elif change == "shorter":
        with segment.open("r+b") as file:
            file.truncate(len(b"".join(file.readlines()[:2])))
        expected = [0]
    else:
        (folder / "lock").write_bytes(b"what an operator wrote")
        expected = [0, 1, 2, 3]
    with closing(Spool(folder)) as spool:
        assert drain(spool) == expected


def test_two_files_of_one_number_are_named_and_kept(folder: Path) -> None:
    with closing(Spool(folder)) as spool:
        spool.append(polls(0))
    (segment,) = segments(folder)
    shutil.copy(segment, folder / "1.jsonl")
    with pytest.raises(StartError, match=f"1.jsonl has the number of {segment.name}; give it another"):
        Spool(folder)
    assert sorted(path.name for path in segments(folder)) == [segment.name, "1.jsonl"]


def test_a_mark_of_an_append_forgets_up_to_there(spool: Spool) -> None:
    first = spool.append(polls(0, 1))
    spool.append(polls(2))
    spool.forget(first)
    assert drain(spool) == [2]


def test_field_that_this_version_does_not_have_is_skipped_and_one_that_was_not_there_is_unset(folder: Path) -> None:
    """A spool that was written by the version before or after this one."""
    with closing(Spool(folder)) as spool:
        spool.append([poll(0, detail="slow", samples=(Sample(GpuDevice(0, "GPU-1", power_usage_mw=5), T0, None, None),))])
    (path,) = segments(folder)
    header, line = path.read_bytes().splitlines()
    names = json.loads(header)
    names["Poll"][names["Poll"].index("detail")] = "mood"
    names["GpuDevice"][names["GpuDevice"].index("power_usage_mw")] = "fan_speed"
    path.write_bytes(json.dumps(names).encode() + b"\n" + line + b"\n")
    with closing(Spool(folder)) as spool:
        assert spool.read(1)[0] == [poll(0, samples=(Sample(GpuDevice(0, "GPU-1"), T0, None, None),))]


# Damage


def test_torn_end_is_recognised_and_costs_only_its_own_line(folder: Path, tmp_path: Path) -> None:
    with closing(Spool(folder)) as spool:
        spool.append(polls(0, 1))
    whole = segments(folder)[0].read_bytes()
    header = whole.index(b"\n")
    for length in (*range(0, header - 2, 50), *range(header - 2, len(whole), 3), len(whole) - 1):
        torn = tmp_path / f"torn-{length}"
        torn.mkdir()
        (torn / "0000000000000001.jsonl").write_bytes(whole[:length])
        with closing(Spool(torn)) as spool:
            spool.append(polls(2))
            left = whole[:length].count(b"\n") - 1
            assert drain(spool) == [*range(max(left, 0)), 2]
            assert spool.stock == (0, 0, 0, None)


def test_damaged_line_is_skipped_and_counted(folder: Path) -> None:
    with closing(Spool(folder)) as spool:
        spool.append(polls(0, 1, 2))
    path = segments(folder)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"vm-1", b"vm-7")
    path.write_bytes(b"".join(lines))
    with closing(Spool(folder)) as spool:
        assert drain(spool) == [0, 2]
        assert spool.damaged == 1


def test_segment_of_zeros_after_a_power_cut_is_dropped(folder: Path) -> None:
    folder.mkdir()
    (folder / "0000000000000007.jsonl").write_bytes(bytes(5000))
    with closing(Spool(folder)) as spool:
        spool.append(polls(1))
        assert drain(spool) == [1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"spool": 2}\n', "0000000000000001.jsonl was written by another version of this program (spool 2)"),
        (b"hello\n", "0000000000000001.jsonl is no segment of a spool"),
    ],
)
def test_file_that_is_none_of_ours_is_named_and_kept(folder: Path, content: bytes, reason: str) -> None:
    folder.mkdir()
    path = folder / "0000000000000001.jsonl"
    path.write_bytes(content)
    with pytest.raises(StartError) as refusal:
        Spool(folder)
    assert str(refusal.value).startswith(f"spool {folder}: {reason}")
    assert path.read_bytes() == content


def test_segment_that_the_disk_does_not_give_back_does_not_stop_the_others(folder: Path) -> None:
    with closing(Spool(folder, segment_bytes=1)) as spool:
        spool.append(polls(0, 1))
        spool.append(polls(2))
        spool.append(polls(3))
        segments(folder)[0].unlink()
        assert drain(spool) == [2, 3]
        assert spool.damaged == 2


# Bounds


@pytest.mark.parametrize("found_at", ["start", "run"])
def test_segment_whose_first_line_is_damaged_is_named_and_kept(
    folder: Path, caplog: pytest.LogCaptureFixture, found_at: str
) -> None:
    """Its other lines are whole, and say nothing without it."""
    with closing(Spool(folder, segment_bytes=1)) as spool:
        for number in (1, 2):
            spool.append(polls(number))
        damaged, _ = segments(folder)
        if found_at == "run":
            damaged.write_bytes(damaged.read_bytes().replace(b'"vmm"', b'"vmn"', 1))
            assert drain(spool) == [2]
            assert spool.damaged == 1
            assert f"file={damaged}.unreadable reason={damaged.name} is no segment of a spool; move it away" in caplog.text
    if found_at == "start":
        damaged.write_bytes(damaged.read_bytes().replace(b'"vmm"', b'"vmn"', 1))
        for _ in range(2):
            with pytest.raises(StartError, match=f"{damaged.name} is no segment of a spool; move it away"):
                Spool(folder)
        damaged.unlink()
        with closing(Spool(folder)) as spool:
            assert drain(spool) == [2]


def test_bound_in_bytes_holds_and_what_is_there_stays(folder: Path) -> None:
    with closing(Spool(folder, max_bytes=20_000)) as spool:
        kept = 0
        with pytest.raises(SpoolFull, match=rf"^spool: [^\n]*{folder}: \d+ of 20000 bytes are used$"):
            while True:
                spool.append(polls(kept))
                kept += 1
        assert sum(path.stat().st_size for path in segments(folder)) == spool.stock.size_bytes <= 20_000
        assert kept > 10
        while spool.stock.size_bytes > 15_000:
            spool.forget(spool.read(kept // 2)[1])
        spool.append(polls(kept))
        assert drain(spool)[-2:] == [kept - 1, kept]


def test_full_disk_leaves_what_is_there_and_no_torn_line(small_disk: Path) -> None:
    with closing(Spool(small_disk / "spool")) as spool:
        kept = 0
        with pytest.raises(SpoolFull, match="No space left on device"):
            while True:
                spool.append([poll(kept, detail="x" * 500)] * 50)
                kept += 1
        assert kept > 5
        found = drain(spool)
        assert found == [number for number in range(kept) for _ in range(50)]
        assert spool.damaged == 0
        spool.append(polls(7))
        assert drain(spool) == [7]


def test_refused_polls_are_set_aside_and_come_back_when_their_file_is_renamed(folder: Path) -> None:
    with closing(Spool(folder)) as spool:
        assert spool.set_aside(polls(0)) == 0
        assert spool.set_aside(polls(1, 2)) == 0
        assert spool.stock.polls == 0
    (folder / SET_ASIDE).rename(folder / "0.jsonl")
    with closing(Spool(folder)) as again:
        assert drain(again) == [0, 1, 2]
        assert list(folder.glob("*.jsonl")) == []


# One program a folder


def test_folder_is_used_by_one_program_at_a_time(folder: Path) -> None:
    program = f"import sys; from pathlib import Path; from aggregator.spool import Spool; Spool(Path({str(folder)!r}))"
    with closing(Spool(folder)):
        with pytest.raises(StartError) as refusal:
            Spool(folder)
        assert str(refusal.value) == f"spool {folder} is in use by another program; give each its own"
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert other.stderr.splitlines()[-1].endswith("is in use by another program; give each its own")
    Spool(folder).close()


def test_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/spool"):
        with pytest.raises(StartError, match=rf"^spool {tmp_path}/{name}: [A-Z][^\n]+$"):
            Spool(tmp_path / name)


def test_marks_are_in_order() -> None:
    assert Mark(1, 500) < Mark(2, 0) < Mark(2, 1)
    assert zlib.crc32(b"123456789") == 0xCBF43926, "the checksum in the files"
