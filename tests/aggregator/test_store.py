from __future__ import annotations

import random
import re
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from aggregator.bulk import ROLLUP_LOCK
from aggregator.database import parse_database_url
from aggregator.errors import DatabaseAway, Unstorable
from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.errors import StartError
from gpuwire.placement import HostAddress
from tests.postgres import until_waiting
from tests.small_disk import small_disk

__all__ = ["small_disk"]

T0 = 1_790_000_000_000
S = 1000
TRAINER = Cvm("rack1", "vm-a", "trainer", "app-1", "instance-1")
SERVER = Cvm("rack1", "vm-b", "server", "app-2")
DEVICE = GpuDevice(
    index=0,
    uuid="GPU-11111111-aaaa",
    pci_bus_id="00000000:01:00.0",
    utilization_gpu=97,
    utilization_memory=0,
    memory_total_bytes=150_754_820_096,
    memory_used_bytes=81_604_378_624,
    memory_free_bytes=69_150_441_472,
    temperature_c=61,
    power_usage_mw=0,
    errors=("power: Not Supported", "temperature: Unknown Error"),
)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """The database as a user of the views sees it."""
    engine = create_engine(parse_database_url(database_url))
    yield engine
    engine.dispose()


def ask(engine: Engine, query: str) -> list[dict[str, Any]]:
    """Rows with timestamps as text and booleans as booleans, as both databases give them then."""

    def plain(name: str, value: Any) -> Any:
        if isinstance(value, datetime):
            return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{value.microsecond / 1000:07.3f}"[:3] + "Z"
        return bool(value) if name.startswith("cc_") and value is not None else value

    with engine.connect() as connection:
        return [{name: plain(name, value) for name, value in row.items()} for row in connection.execute(text(query)).mappings()]


def column(engine: Engine, query: str) -> list[Any]:
    return [next(iter(row.values())) for row in ask(engine, query)]


def sample(at_ms: int, device: GpuDevice = DEVICE, host: HostAddress | None = None, model: str | None = None) -> Sample:
    return Sample(device, at_ms, Bdf.parse_or_none(device.pci_bus_id), host, model)


def poll(at_ms: int, *samples: Sample, cvm: Cvm = TRAINER, outcome: str = "ok", **more: Any) -> Poll:
    return Poll(cvm, at_ms, outcome, samples=samples, **more)


def polls_of(cvm: Cvm, start_ms: int, count: int, device: GpuDevice = DEVICE) -> list[Poll]:
    """One poll each 15 s, its sample 2 s old."""
    return [poll(at, sample(at - 2 * S, device), cvm=cvm) for at in range(start_ms, start_ms + count * 15 * S, 15 * S)]


def host(address: str, source: str) -> HostAddress:
    return HostAddress(Bdf.parse(address), source)


STAYS = "SELECT vm_id, bdf, host_bdf, host_bdf_source, first_seen, last_seen FROM v_gpu_tenancy ORDER BY first_seen, vm_id"


def stays(engine: Engine) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in ask(engine, STAYS)]


def stamp(ms: int) -> str:
    return datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{ms % 1000:03d}Z"


# Which CVM


STRETCHES = """SELECT cvm.app_id, since_ms - :t0, until_ms - :t0, outcome
    FROM cvm_state JOIN cvm ON cvm.cvm_id = cvm_state.cvm_id ORDER BY since_ms, cvm_state.state_id"""


@pytest.mark.parametrize("restarted", [False, True])
def test_a_vm_id_that_is_given_to_another_app_becomes_another_cvm(
    store: Store, database_url: str, engine: Engine, restarted: bool
) -> None:
    other = replace(TRAINER, vm_name="tenant-2", app_id="app-2", instance_id="instance-2")

    def write(*polls: Poll) -> None:
        if restarted:
            with closing(Store(database_url)) as again:
                again.write(polls)
        else:
            store.write(polls)

    write(*polls_of(TRAINER, T0, 4))
    write(poll(T0 + 60 * S, cvm=TRAINER, outcome="not_running"))
    write(*polls_of(other, T0 + 75 * S, 4))
    # What names no app is the one that it was last.
    write(*polls_of(replace(TRAINER, vm_name="", app_id="", instance_id=""), T0 + 135 * S, 2))
    write(*polls_of(TRAINER, T0 + 165 * S, 2))

    tenancy = ask(engine, "SELECT vm_id, vm_name, app_id, instance_id, first_seen, last_seen FROM v_gpu_tenancy ORDER BY 5")
    assert [tuple(row.values()) for row in tenancy] == [
        ("vm-a", "trainer", "app-1", "instance-1", stamp(T0 - 2 * S), stamp(T0 + 45 * S)),
        ("vm-a", "tenant-2", "app-2", "instance-2", stamp(T0 + 73 * S), stamp(T0 + 150 * S)),
        ("vm-a", "trainer", "app-1", "instance-1", stamp(T0 + 163 * S), stamp(T0 + 180 * S)),
    ]
    apps = column(engine, "SELECT app_id FROM v_gpu_samples ORDER BY sampled_at_ms")
    assert apps == ["app-1"] * 4 + ["app-2"] * 6 + ["app-1"] * 2
    with engine.connect() as connection:
        stretches = [tuple(row) for row in connection.execute(text(STRETCHES), {"t0": T0})]
    assert stretches == [
        ("app-1", 0, 45 * S, "ok"),
        ("app-1", 60 * S, 60 * S, "not_running"),
        ("app-2", 75 * S, 150 * S, "ok"),
        ("app-1", 165 * S, 180 * S, "ok"),
    ]
    assert [(c["app_id"], c["outcome"], c["gpus"]) for c in store.cvms()] == [("app-2", "ok", 0), ("app-1", "ok", 1)]


def test_an_app_that_becomes_known_names_the_cvm_that_was_there(store: Store, engine: Engine) -> None:
    store.write(polls_of(replace(TRAINER, app_id=""), T0, 2))
    store.write(polls_of(TRAINER, T0 + 30 * S, 2))
    assert column(engine, "SELECT app_id FROM v_gpu_samples") == ["app-1"] * 4
    assert len(stays(engine)) == 1


def test_what_one_app_did_goes_on_for_none_under_anothers_time(store: Store, engine: Engine) -> None:
    other = replace(TRAINER, app_id="app-2")
    store.write([*polls_of(TRAINER, T0, 2), *polls_of(other, T0 + 3600 * S, 1), *polls_of(TRAINER, T0 + 7200 * S, 1)])
    with engine.connect() as connection:
        stretches = [tuple(row)[:3] for row in connection.execute(text(STRETCHES), {"t0": T0})]
    assert stretches == [
        ("app-1", 0, 15 * S),
        ("app-2", 3600 * S, 3600 * S),
        ("app-1", 7200 * S, 7200 * S),
    ]


# Rows


def test_sample_comes_out_of_the_view_as_it_went_in(store: Store, engine: Engine) -> None:
    assert store.write([poll(T0 + 123, sample(T0, host=host("19:00.0", "order")))]) == 1
    assert ask(engine, "SELECT * FROM v_gpu_samples") == [
        {
            "vmm": "rack1",
            "vm_id": "vm-a",
            "vm_name": "trainer",
            "app_id": "app-1",
            "instance_id": "instance-1",
            "uuid": "GPU-11111111-aaaa",
            "gpu_index": 0,
            "pci_bus_id": "00000000:01:00.0",
            "bdf": "0000:01:00.0",
            "host_bdf": "0000:19:00.0",
            "host_bdf_source": "order",
            "sampled_at": "2026-09-21T14:13:20.000Z",
            "sampled_at_ms": T0,
            "polled_at_ms": T0 + 123,
            "utilization_gpu": 97,
            "utilization_memory": 0,
            "memory_total_bytes": 150_754_820_096,
            "memory_used_bytes": 81_604_378_624,
            "memory_free_bytes": 69_150_441_472,
            "temperature_c": 61,
            "power_usage_mw": 0,
            "query_errors": 2,
        }
    ]


def test_unanswered_is_null_and_a_true_zero_is_zero(store: Store, engine: Engine) -> None:
    store.write([poll(T0, sample(T0, GpuDevice(index=3, uuid="GPU-2", utilization_gpu=0)), cvm=Cvm("rack1", "vm-a"))])
    row = ask(engine, "SELECT * FROM v_gpu_samples")[0]
    present = {name for name, value in row.items() if value is not None}
    assert present == {
        *("vmm", "vm_id", "uuid", "gpu_index", "sampled_at", "sampled_at_ms", "polled_at_ms"),
        *("utilization_gpu", "query_errors"),
    }
    assert (row["utilization_gpu"], row["query_errors"]) == (0, 0)


def test_timestamps_are_exact_to_the_millisecond(store: Store, engine: Engine) -> None:
    milliseconds = [0, 1, 5, 49, 50, 499, 500, 501, 994, 995, 999]
    cvms = [Cvm("rack1", f"vm-{ms:03d}") for ms in milliseconds]
    nameless = replace(DEVICE, uuid="")
    store.write([poll(T0 + ms, sample(T0 + ms, nameless), cvm=cvm) for ms, cvm in zip(milliseconds, cvms, strict=True)])
    expected = [f"2026-09-21T14:13:20.{ms:03d}Z" for ms in milliseconds]
    assert column(engine, "SELECT sampled_at FROM v_gpu_samples ORDER BY vm_id") == expected
    assert column(engine, "SELECT since FROM v_cvm_state ORDER BY vm_id") == expected
    assert [row["sampled_at"] for row in store.latest()] == expected


def test_largest_values_that_a_guest_may_send_are_stored(store: Store, engine: Engine) -> None:
    extreme = replace(DEVICE, index=2**32 - 1, memory_total_bytes=2**48, power_usage_mw=10_000_000, errors=("",) * 64)
    assert store.write([poll(T0, sample(T0, extreme))]) == 1
    assert column(engine, "SELECT gpu_index FROM v_gpu_latest") == [2**32 - 1]


def test_text_that_a_database_cannot_hold_does_not_stop_the_batch(store: Store, engine: Engine) -> None:
    odd = replace(DEVICE, pci_bus_id="01:00\0", uuid="GPU-\0")
    assert store.write([poll(T0, sample(T0, odd), detail="broken \ud800 \0 text"), poll(T0, sample(T0), cvm=SERVER)]) == 2
    assert column(engine, "SELECT detail FROM v_cvm_state ORDER BY vm_id") == ["broken \ufffd \ufffd text", None]
    assert column(engine, "SELECT pci_bus_id FROM v_gpu_samples ORDER BY vm_id") == ["01:00\ufffd", "00000000:01:00.0"]
    assert store.write([poll(T0 + 15 * S, sample(T0 + 15 * S, odd))]) == 1
    assert len(store.latest()) == 2


def test_same_history_is_the_same_on_both_databases(postgres_url: str, tmp_path: Path) -> None:
    answers = []
    for url in (postgres_url, f"sqlite:///{tmp_path}/history.db"):
        engine = create_engine(parse_database_url(url))
        with closing(Store(url)) as store:
            store.require_current()
            written = [store.write(batch) for batch in random_history(random.Random(7))]
            views = ("v_gpu_samples", "v_gpu_latest", "v_gpu_tenancy", "v_cvm_state")
            rows = {view: sorted(ask(engine, f"SELECT * FROM {view}"), key=repr) for view in views}
            answers.append((written, rows, store.latest(), store.cvms()))
        engine.dispose()
    assert answers[0] == answers[1]
    assert len(answers[0][1]["v_gpu_samples"]) == sum(answers[0][0]) > 200


def random_history(chance: random.Random) -> Iterator[list[Poll]]:
    """A small fleet whose cards move, fall silent, lose their uuid and repeat themselves."""
    places = [(cvm, f"0{slot}:00.0") for cvm in (TRAINER, SERVER, Cvm("rack2", "vm-a", "trainer")) for slot in (1, 2)]
    cards = {f"GPU-{number}": chance.choice(places) for number in range(5)}
    for turn in range(60):
        batch = []
        for cvm in dict.fromkeys(cvm for cvm, _ in places):
            at_ms = T0 + turn * 15 * S + chance.randrange(900)
            samples = []
            for uuid, (where, address) in cards.items():
                if where == cvm:
                    device = replace(
                        DEVICE,
                        uuid=chance.choice([uuid] * 9 + [""]),
                        pci_bus_id=f"00000000:{address}",
                        utilization_gpu=chance.choice([None, 0, 55, 100]),
                    )
                    source = chance.choice(["order", "qmp"])
                    samples.append(sample(at_ms - chance.choice([0, 4 * S, 15 * S]), device, host("19:00.0", source)))
            outcome = chance.choice(["ok"] * 8 + ["timeout"])
            ready = chance.choice([True, True, None])
            batch.append(poll(at_ms, *(samples if outcome == "ok" else ()), cvm=cvm, outcome=outcome, cc_ready=ready))
        yield batch
        if chance.random() < 0.1:
            cards[chance.choice(list(cards))] = chance.choice(places)


# Twice, late, back in time


def test_same_batch_again_changes_nothing(database_url: str, store: Store, engine: Engine) -> None:
    moved = replace(DEVICE, pci_bus_id="00000000:02:00.0")
    batch = [
        *polls_of(TRAINER, T0, 4),
        poll(T0 + 60 * S, outcome="timeout", detail="slow"),
        *polls_of(SERVER, T0 + 75 * S, 3, moved),
        poll(T0 + 120 * S, sample(T0 + 103 * S + 40, moved), cvm=SERVER),
        *polls_of(TRAINER, T0 + 135 * S, 2),
    ]
    views = ("v_gpu_samples", "v_gpu_latest", "v_gpu_tenancy", "v_cvm_state")
    assert store.write(batch) == 9
    before = [ask(engine, f"SELECT * FROM {view} ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10") for view in views]
    assert store.write(batch) == 0
    with closing(Store(database_url)) as restarted:
        assert restarted.write(batch) == 0
        assert restarted.write(batch[6:]) == 0
    assert [ask(engine, f"SELECT * FROM {view} ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10") for view in views] == before


@pytest.mark.parametrize("restarted", [False, True])
def test_snapshot_that_is_served_again_is_not_stored_twice(
    database_url: str, store: Store, engine: Engine, restarted: bool
) -> None:
    store.write([poll(T0, sample(T0))])
    with closing(Store(database_url)) as again:
        other = again if restarted else store
        assert other.write([poll(T0 + 15 * S, sample(T0 + 1000)), poll(T0 + 30 * S, sample(T0 - 1000))]) == 0
        assert other.write([poll(T0 + 45 * S, sample(T0 + 1001))]) == 1
    assert stays(engine) == [("vm-a", "0000:01:00.0", None, None, stamp(T0), stamp(T0 + 45 * S))]
    assert column(engine, "SELECT until FROM v_cvm_state") == [stamp(T0 + 45 * S)]


def test_card_that_is_named_twice_in_one_reply_is_one_sample(store: Store, engine: Engine) -> None:
    second = replace(DEVICE, index=1, pci_bus_id="00000000:02:00.0")
    assert store.write([poll(T0, sample(T0), sample(T0 + 5000, second))]) == 1
    assert [row[1] for row in stays(engine)] == ["0000:01:00.0"]


def test_clock_that_is_set_back_loses_and_doubles_nothing(store: Store, engine: Engine) -> None:
    hour = [
        replace(one, samples=tuple(replace(s, device=replace(DEVICE, power_usage_mw=turn)) for s in one.samples))
        for turn, one in enumerate(polls_of(TRAINER, T0, 8))
    ]
    assert store.write(hour) == 8
    # The same times but for 200 ms, other figures; each is served twice.
    again = [
        replace(
            one,
            polled_at_ms=one.polled_at_ms + delay,
            samples=tuple(
                Sample(replace(s.device, temperature_c=70), s.sampled_at_ms + 200 + delay // 100, s.bdf, None)
                for s in one.samples
            ),
        )
        for one in hour[4:]
        for delay in (200, 5200)
    ]
    assert store.write(again[:4]) == 2
    assert store.write(again) == 2
    assert store.write(polls_of(TRAINER, T0 + 8 * 15 * S, 1)) == 1
    assert column(engine, "SELECT count(*) FROM v_gpu_samples") == [13]
    assert column(engine, "SELECT count(*) FROM v_gpu_tenancy") == [1]
    assert column(engine, "SELECT count(*) FROM v_cvm_state") == [1]


def test_time_that_comes_twice_in_one_batch_is_one_sample(store: Store, engine: Engine) -> None:
    store.write([poll(T0, sample(T0))])
    times = [15, 75, 15, 75, 90]
    cooler = [replace(DEVICE, temperature_c=degrees) for degrees in range(40, 40 + len(times))]
    batch = [poll(T0 + at * S, sample(T0 + at * S, device)) for at, device in zip(times, cooler, strict=True)]
    assert store.write(batch) == 3
    assert column(engine, "SELECT sampled_at_ms FROM v_gpu_samples ORDER BY 1") == [T0 + at * S for at in (0, 15, 75, 90)]


def test_writers_that_know_different_things_store_nothing_twice(database_url: str, store: Store, engine: Engine) -> None:
    """`poll` beside `serve`: each remembers what it wrote itself."""
    devices = [replace(DEVICE, uuid=f"GPU-{n}", pci_bus_id=f"00000000:0{n + 1}:00.0") for n in range(3)]
    times = [T0 + turn * 15 * S for turn in range(12)]
    batches = [[poll(at, *(sample(at - 2 * S, device) for device in devices))] for at in times]
    with closing(Store(database_url)) as other:
        assert store.write(batches[0]) == 3
        assert other.write(batches[0]) == 0
        assert other.write(batches[1]) == 3
        # The one knows nothing of it; a part of what it has is new.
        assert store.write([*batches[1], *batches[2]]) == 3
        assert other.write(batches[4]) == store.write(batches[3]) == 3
        assert other.write([*batches[3], *batches[5]]) == 3
        assert store.write([poll for batch in batches for poll in batch]) == 18
        assert other.write([poll for batch in batches for poll in batch]) == 0
    assert column(engine, "SELECT count(*) FROM v_gpu_samples") == [36]
    assert column(engine, "SELECT DISTINCT sampled_at_ms FROM v_gpu_latest") == [times[-1] - 2 * S]


def test_latest_never_moves_back(database_url: str, store: Store, engine: Engine) -> None:
    store.write([poll(T0, sample(T0))])
    late = poll(T0 - 60 * S, sample(T0 - 60 * S, replace(DEVICE, utilization_gpu=1)))
    with closing(Store(database_url)) as restarted:
        assert restarted.write([late]) == 1
    assert store.write([replace(late, samples=(sample(T0 - 90 * S),))]) == 1
    assert column(engine, "SELECT sampled_at_ms FROM v_gpu_latest") == [T0]
    assert column(engine, "SELECT utilization_gpu FROM v_gpu_latest") == [97]
    assert column(engine, "SELECT count(*) FROM v_gpu_samples") == [3]


def due(engine: Engine) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in ask(engine, "SELECT * FROM rollup_due ORDER BY resolution, gpu_id, bucket_ms")]


def close_buckets(engine: Engine, to_ms: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE progress SET closed_to_ms = :at WHERE resolution = '5m'"), {"at": to_ms})


def test_buckets_of_samples_that_come_late_become_due(store: Store, engine: Engine) -> None:
    bucket = T0 // 300_000 * 300_000
    other = replace(DEVICE, uuid="GPU-2", pci_bus_id="02:00.0")
    store.write([poll(T0, sample(T0), sample(T0, other))])
    assert due(engine) == []
    close_buckets(engine, bucket + 600_000)
    # Just in time, late but the newest of its card, late and older, twice in one bucket.
    on_time = poll(bucket + 600 * S, sample(bucket + 600 * S, other))
    assert store.write([on_time]) == 1
    assert due(engine) == []
    late = [bucket + 600 * S - 1, T0 - 300 * S, T0 - 290 * S, T0 + 40 * S]
    assert store.write([poll(at, sample(at)) for at in late]) == 4
    card = column(engine, "SELECT gpu_id FROM gpu WHERE uuid = 'GPU-11111111-aaaa'")[0]
    assert due(engine) == [("5m", card, bucket + offset * S) for offset in (-300, 0, 300)]
    assert store.write([poll(at, sample(at)) for at in late]) == 0
    assert len(due(engine)) == 3


def test_late_sample_whose_batch_failed_makes_nothing_due(store: Store, engine: Engine) -> None:
    store.write([poll(T0, sample(T0))])
    close_buckets(engine, T0 + 3600 * S)
    with pytest.raises(Unstorable):
        store.write(
            [poll(T0 + S, sample(T0 + 15 * S)), poll(T0, sample(T0 + 30 * S, replace(DEVICE, memory_used_bytes=2**70)))]
        )
    assert due(engine) == []


def test_writer_in_flight_does_not_miss_that_its_samples_are_late(postgres_url: str) -> None:
    """closed_to_ms is raised while a batch begins: the batch waits, and sees it."""
    with closing(Store(postgres_url)) as store:
        store.require_current()
        store.write([poll(T0, sample(T0))])
        write_while_buckets_are_closed(postgres_url, store)
    with psycopg.connect(postgres_url) as other:
        assert other.execute("SELECT bucket_ms FROM rollup_due").fetchall() == [((T0 + 15 * S) // 300_000 * 300_000,)]


def write_while_buckets_are_closed(postgres_url: str, store: Store) -> None:
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", (ROLLUP_LOCK,))
        other.execute("UPDATE progress SET closed_to_ms = %s WHERE resolution = '5m'", (T0 + 3600 * S,))
        writer = threading.Thread(target=store.write, args=([poll(T0 + 15 * S, sample(T0 + 15 * S))],))
        writer.start()
        time.sleep(0.3)
        assert writer.is_alive()
    writer.join()


# Cards and places


def test_card_that_moves_closes_one_stay_and_opens_another(store: Store, engine: Engine) -> None:
    store.write(polls_of(TRAINER, T0, 3))
    store.write(polls_of(SERVER, T0 + 60 * S, 2))
    store.write(polls_of(TRAINER, T0 + 120 * S, 1))
    assert stays(engine) == [
        ("vm-a", "0000:01:00.0", None, None, stamp(T0 - 2 * S), stamp(T0 + 30 * S)),
        ("vm-b", "0000:01:00.0", None, None, stamp(T0 + 58 * S), stamp(T0 + 75 * S)),
        ("vm-a", "0000:01:00.0", None, None, stamp(T0 + 118 * S), stamp(T0 + 120 * S)),
    ]
    assert column(engine, "SELECT vm_id FROM v_gpu_samples ORDER BY sampled_at_ms") == ["vm-a"] * 3 + ["vm-b"] * 2 + ["vm-a"]
    assert column(engine, "SELECT vm_id FROM v_gpu_latest") == ["vm-a"]


def test_host_address_is_kept_bettered_and_only_its_change_is_a_move(store: Store, engine: Engine) -> None:
    steps = [
        None,
        host("19:00.0", "order"),  # becomes known: the same stay
        None,  # a neighbour fell off the bus: what was found holds
        host("3b:00.0", "qmp"),  # surer: bettered in place
        host("19:00.0", "order"),  # less sure: does not count
        host("5d:00.0", "qmp"),  # as sure, another slot: a move
    ]
    for turn, address in enumerate(steps):
        store.write([poll(T0 + turn * 15 * S, sample(T0 + turn * 15 * S, host=address))])
    assert stays(engine) == [
        ("vm-a", "0000:01:00.0", "0000:3b:00.0", "qmp", stamp(T0), stamp(T0 + 60 * S)),
        ("vm-a", "0000:01:00.0", "0000:5d:00.0", "qmp", stamp(T0 + 75 * S), stamp(T0 + 75 * S)),
    ]


def test_addresses_that_differ_in_the_domain_are_two_places(store: Store, engine: Engine) -> None:
    forms = ["0000:19:00.0", "00000000:19:00.0", "19:00.0", "10000:19:00.0"]
    for turn, form in enumerate(forms):
        nameless = replace(DEVICE, uuid="", pci_bus_id=form)
        store.write([poll(T0 + turn * 15 * S, sample(T0 + turn * 15 * S, nameless))])
    assert [row[1] for row in stays(engine)] == ["0000:19:00.0", "10000:19:00.0"]
    assert column(engine, "SELECT bdf FROM v_gpu_latest ORDER BY bdf") == ["0000:19:00.0", "10000:19:00.0"]
    assert column(engine, "SELECT pci_bus_id FROM v_gpu_latest ORDER BY bdf") == ["19:00.0", "10000:19:00.0"]


def test_card_without_uuid_is_kept_under_its_place(database_url: str, store: Store, engine: Engine) -> None:
    nameless = replace(DEVICE, uuid="")
    store.write([poll(T0, sample(T0, nameless)), poll(T0, sample(T0, nameless), cvm=SERVER)])
    with closing(Store(database_url)) as restarted:
        restarted.write([poll(T0 + 15 * S, sample(T0 + 15 * S, nameless))])
    assert ask(engine, "SELECT vm_id, uuid, sampled_at_ms FROM v_gpu_latest ORDER BY vm_id") == [
        {"vm_id": "vm-a", "uuid": None, "sampled_at_ms": T0 + 15 * S},
        {"vm_id": "vm-b", "uuid": None, "sampled_at_ms": T0},
    ]


def test_card_with_neither_uuid_nor_address_is_not_stored(store: Store, engine: Engine) -> None:
    nobody = replace(DEVICE, uuid="", pci_bus_id="")
    assert store.write([poll(T0, sample(T0, nobody))]) == 0
    assert column(engine, "SELECT outcome FROM v_cvm_state") == ["ok"]


def test_indexes_may_be_renumbered(store: Store, engine: Engine) -> None:
    for turn in range(2):
        first, second = replace(DEVICE, index=turn), replace(DEVICE, index=1 - turn, uuid="GPU-2", pci_bus_id="02:00.0")
        store.write([poll(T0 + turn * 15 * S, sample(T0 + turn * 15 * S, first), sample(T0 + turn * 15 * S, second))])
    assert len(stays(engine)) == 2
    assert column(engine, "SELECT gpu_index FROM v_gpu_latest ORDER BY bdf") == [1, 0]


def test_names_and_model_are_kept_up_to_date(store: Store, engine: Engine) -> None:
    store.write([poll(T0, sample(T0, model="H100"))])
    store.write([poll(T0 + 15 * S, sample(T0 + 15 * S, model="H200"), cvm=replace(TRAINER, vm_name="trainer-2"))])
    store.write([poll(T0 + 30 * S, sample(T0 + 30 * S), cvm=Cvm("rack1", "vm-a"))])
    assert ask(engine, "SELECT vm_name, app_id, model FROM v_gpu_latest") == [
        {"vm_name": "trainer-2", "app_id": "app-1", "model": "H200"}
    ]
    assert len(store.cvms()) == 1


# A card whose uuid comes late


NAMELESS = replace(DEVICE, uuid="")
UUIDS = "SELECT uuid FROM v_gpu_samples ORDER BY sampled_at_ms"


def turns(*devices: GpuDevice, cvm: Cvm = TRAINER, start: int = 0, address: HostAddress | None = None) -> list[Poll]:
    """One poll each 15 s, a device each."""
    times = (T0 + turn * 15 * S for turn in range(start, start + len(devices)))
    return [poll(at, sample(at, device, address), cvm=cvm) for at, device in zip(times, devices, strict=True)]


@pytest.mark.parametrize("batches", ["one", "many", "restarted"])
def test_card_is_joined_with_what_its_place_kept_once_its_uuid_is_known(
    database_url: str, store: Store, engine: Engine, batches: str
) -> None:
    history = turns(NAMELESS, NAMELESS, DEVICE, DEVICE)
    if batches == "one":
        store.write(history)
    for one in history if batches != "one" else ():
        if batches == "many":
            store.write([one])
        else:
            with closing(Store(database_url)) as restarted:
                restarted.write([one])
    assert column(engine, UUIDS) == ["GPU-11111111-aaaa"] * 4
    assert ask(engine, "SELECT uuid, sampled_at_ms FROM v_gpu_latest") == [
        {"uuid": "GPU-11111111-aaaa", "sampled_at_ms": T0 + 45 * S}
    ]
    assert stays(engine) == [("vm-a", "0000:01:00.0", None, None, stamp(T0), stamp(T0 + 45 * S))]
    assert [row["gpus"] for row in store.cvms()] == [1]


def test_uuid_that_is_missing_for_a_while_is_one_card_and_one_stay(store: Store, engine: Engine) -> None:
    for one in turns(DEVICE, NAMELESS, NAMELESS, DEVICE, DEVICE):
        store.write([one])
    assert column(engine, UUIDS) == ["GPU-11111111-aaaa"] * 5
    assert stays(engine) == [("vm-a", "0000:01:00.0", None, None, stamp(T0), stamp(T0 + 60 * S))]
    assert len(store.latest()) == 1


def test_same_history_of_a_joined_card_again_changes_nothing(database_url: str, store: Store, engine: Engine) -> None:
    history = turns(NAMELESS, NAMELESS, DEVICE, NAMELESS, DEVICE, NAMELESS)
    views = ("v_gpu_samples", "v_gpu_latest", "v_gpu_tenancy", "v_cvm_state")
    assert store.write(history) == 6
    before = [ask(engine, f"SELECT * FROM {view} ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10") for view in views]
    for _ in range(2):
        with closing(Store(database_url)) as restarted:
            assert restarted.write(history) == 0
            assert restarted.write(history[:2]) == 0
    assert store.write(history) == 0
    assert [ask(engine, f"SELECT * FROM {view} ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10") for view in views] == before


def test_uuid_that_comes_and_goes_makes_one_row_an_hour(store: Store, engine: Engine) -> None:
    for one in turns(*[DEVICE, NAMELESS] * 100):
        store.write([one])
    assert column(engine, UUIDS) == ["GPU-11111111-aaaa"] * 200
    assert column(engine, "SELECT count(*) FROM gpu") == [2]
    assert len(stays(engine)) == len(store.latest()) == 1


def test_snapshot_that_was_served_before_and_after_the_uuid_is_one_sample(store: Store, engine: Engine) -> None:
    store.write([poll(T0, sample(T0 - S, NAMELESS))])
    assert store.write([poll(T0 + 15 * S, sample(T0 - S))]) == 0
    assert ask(engine, "SELECT uuid, sampled_at_ms FROM v_gpu_latest") == [
        {"uuid": "GPU-11111111-aaaa", "sampled_at_ms": T0 - S}
    ]
    assert store.write([poll(T0 + 30 * S, sample(T0 + 30 * S))]) == 1
    assert len(stays(engine)) == 1


def test_card_that_moved_while_contested_takes_its_samples_along(store: Store, engine: Engine) -> None:
    """The newcomer's samples are kept without uuid until the older CVM stops reporting the card."""
    store.write(turns(DEVICE, DEVICE))
    store.write(turns(NAMELESS, NAMELESS, DEVICE, cvm=SERVER, start=2))
    assert column(engine, UUIDS) == ["GPU-11111111-aaaa"] * 5
    assert [(row[0], row[4]) for row in stays(engine)] == [("vm-a", stamp(T0)), ("vm-b", stamp(T0 + 30 * S))]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("reason", ["elsewhere", "another", "host", "late"])
def test_place_stays_without_uuid_where_it_may_have_been_another_card(
    database_url: str, store: Store, engine: Engine, reason: str, restarted: bool
) -> None:
    other = replace(DEVICE, uuid="GPU-2")
    before: list[Poll] = []
    place = turns(NAMELESS, NAMELESS, start=2, address=host("19:00.0", "qmp"))
    after = turns(DEVICE, DEVICE, start=4, address=host("19:00.0", "qmp"))
    if reason == "elsewhere":
        before = turns(DEVICE, DEVICE, DEVICE, DEVICE, cvm=SERVER)
    elif reason == "another":
        before = turns(other, other, address=host("19:00.0", "qmp"))
    elif reason == "host":
        after = turns(DEVICE, DEVICE, start=4, address=host("3b:00.0", "qmp"))
    else:
        after = turns(DEVICE, DEVICE, start=4 + 3600 // 15, address=host("19:00.0", "qmp"))
    writing = Store(database_url) if restarted else store
    for batch in (before, place, after):
        writing.write(batch)
        if restarted:
            writing.close()
            writing = Store(database_url)
    writing.close()
    assert column(engine, "SELECT count(*) FROM v_gpu_samples WHERE uuid IS NULL") == [2]
    assert column(engine, "SELECT uuid FROM v_gpu_samples WHERE vm_id = 'vm-a' ORDER BY sampled_at_ms DESC LIMIT 1") == [
        DEVICE.uuid
    ]
    # The next one without uuid there is not taken for what was left behind.
    later = turns(NAMELESS, start=2000, address=host("19:00.0", "qmp"))
    with closing(Store(database_url)) as restarted_store:
        restarted_store.write(later)
    assert column(engine, "SELECT count(*) FROM v_gpu_tenancy WHERE uuid IS NULL") == [2]


def test_card_that_is_named_with_and_without_uuid_in_one_reply_is_one(store: Store, engine: Engine) -> None:
    for turn in range(4):
        at = T0 + turn * 15 * S
        store.write([poll(at, sample(at, NAMELESS), sample(at))])
    assert column(engine, UUIDS) == ["GPU-11111111-aaaa"] * 4
    assert column(engine, "SELECT count(*) FROM gpu") == [1]


def test_slot_whose_card_is_replaced_shows_two_cards_and_the_date(store: Store, engine: Engine) -> None:
    address = host("19:00.0", "qmp")
    store.write(turns(DEVICE, DEVICE, address=address))
    store.write(turns(replace(DEVICE, uuid="GPU-2"), replace(DEVICE, uuid="GPU-2"), start=4, address=address))
    history = "SELECT uuid, first_seen FROM v_gpu_tenancy WHERE host_bdf = '0000:19:00.0' ORDER BY first_seen"
    assert [tuple(row.values()) for row in ask(engine, history)] == [(DEVICE.uuid, stamp(T0)), ("GPU-2", stamp(T0 + 60 * S))]


def test_two_cards_that_swap_places_are_four_stays(store: Store, engine: Engine) -> None:
    places = ("00000000:01:00.0", "00000000:02:00.0")
    for turn in range(4):
        at = T0 + turn * 15 * S
        devices = [replace(DEVICE, uuid=f"GPU-{n}", pci_bus_id=places[(n + turn // 2) % 2]) for n in range(2)]
        store.write([poll(at, *(sample(at, device) for device in devices))])
    found = ask(engine, "SELECT uuid, bdf FROM v_gpu_tenancy ORDER BY first_seen, uuid")
    assert [tuple(row.values()) for row in found] == [
        *(("GPU-0", "0000:01:00.0"), ("GPU-1", "0000:02:00.0")),
        *(("GPU-0", "0000:02:00.0"), ("GPU-1", "0000:01:00.0")),
    ]


# How far a span reaches


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reached(engine: Engine) -> tuple[Any, ...]:
    rows = ask(engine, "SELECT (SELECT until FROM v_cvm_state WHERE vm_id = 'vm-a'), (SELECT last_seen FROM v_gpu_tenancy)")
    return tuple(rows[0].values())


@pytest.mark.usefixtures("store")
def test_last_times_are_written_once_a_minute_and_at_the_end(database_url: str, engine: Engine) -> None:
    clock, seen = Clock(), []
    with closing(Store(database_url, clock=clock)) as store:
        for turn, one in enumerate(turns(*[DEVICE] * 11)):
            clock.now = 15.0 * turn
            store.write([one])
            seen.append(reached(engine))
    minutes = [turn - turn % 4 for turn in range(11)]
    assert seen == [(stamp(T0 + turn * 15 * S),) * 2 for turn in minutes]
    assert reached(engine) == (stamp(T0 + 150 * S),) * 2


@pytest.mark.usefixtures("store")
def test_last_time_of_what_is_not_heard_of_again_is_written_within_a_minute(database_url: str, engine: Engine) -> None:
    clock = Clock()
    with closing(Store(database_url, clock=clock)) as store:
        store.write(turns(DEVICE))
        store.write(turns(DEVICE, start=1))
        assert reached(engine) == (stamp(T0),) * 2
        clock.now = 60.0
        store.write([])
        assert reached(engine) == (stamp(T0 + 15 * S),) * 2


@pytest.mark.usefixtures("store")
def test_last_time_is_written_when_anything_else_changes(database_url: str, engine: Engine) -> None:
    with closing(Store(database_url)) as store:
        store.write(turns(DEVICE, DEVICE))
        store.write(turns(DEVICE, start=2))
        store.write([poll(T0 + 45 * S, outcome="timeout"), *turns(DEVICE, cvm=SERVER, start=4)])
        assert column(engine, "SELECT until FROM v_cvm_state WHERE outcome = 'ok' AND vm_id = 'vm-a'") == [stamp(T0 + 30 * S)]
        assert [row[5] for row in stays(engine)] == [stamp(T0 + 30 * S), stamp(T0 + 60 * S)]


@pytest.mark.usefixtures("store")
def test_last_times_outlive_a_batch_that_fails(database_url: str, engine: Engine) -> None:
    with closing(Store(database_url)) as store:
        store.write(turns(DEVICE))
        store.write(turns(DEVICE, start=1))
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE gpu_latest RENAME TO hidden"))
        with pytest.raises(DatabaseAway):
            store.write(turns(DEVICE, start=2))
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE hidden RENAME TO gpu_latest"))
        store.write([])
    assert reached(engine) == (stamp(T0 + 15 * S),) * 2


@pytest.mark.parametrize(("gap_s", "stretches"), [(100, 1), (121, 2)])
def test_time_in_which_no_run_polled_lies_in_no_stretch(
    database_url: str, store: Store, engine: Engine, gap_s: int, stretches: int
) -> None:
    store.write(turns(DEVICE))
    with closing(Store(database_url)) as next_run:
        late = T0 + gap_s * S
        assert next_run.write([poll(late, sample(late)), poll(late + 3600 * S)]) == 1
    assert len(column(engine, "SELECT until FROM v_cvm_state")) == stretches
    assert len(stays(engine)) == 1


@pytest.mark.parametrize(("back_s", "untils_s"), [(50, [50]), (80, [30, 80])])
@pytest.mark.usefixtures("store")
def test_stretch_of_a_killed_run_reaches_as_far_as_the_cards_that_it_stored(
    database_url: str, engine: Engine, back_s: int, untils_s: list[int]
) -> None:
    with closing(Store(database_url)) as killed:
        for turn in range(3):
            killed.write(turns(DEVICE, start=turn))
        assert column(engine, "SELECT until FROM v_cvm_state") == [stamp(T0)], "not written yet"
        with closing(Store(database_url, resume_within_s=30)) as next_run:
            next_run.write([poll(T0 + back_s * S)])
        assert column(engine, "SELECT until FROM v_cvm_state ORDER BY until") == [stamp(T0 + at * S) for at in untils_s]


def test_what_an_earlier_run_left_does_not_hide_its_end(store: Store, engine: Engine) -> None:
    store.write(turns(DEVICE))
    store.begin_run()
    store.write(turns(DEVICE, start=100))
    assert column(engine, "SELECT since FROM v_cvm_state ORDER BY since") == [stamp(T0), stamp(T0 + 1500 * S)]


# Outcomes


def test_stretch_goes_on_while_polls_are_alike_and_the_rest_is_a_new_one(store: Store, engine: Engine) -> None:
    turns: list[dict[str, Any]] = [
        {"outcome": "ok", "schema_status": "match", "cc_enabled": True, "cc_ready": False},
        {"outcome": "ok", "schema_status": "match", "cc_enabled": True, "cc_ready": True},
        {"outcome": "ok", "schema_status": "match", "cc_enabled": True, "cc_ready": True},
        {"outcome": "timeout", "detail": "no answer in 8 s"},
        {"outcome": "timeout", "detail": "no answer in 10 s"},
        {"outcome": "ok", "schema_status": "older", "cc_enabled": True, "cc_ready": True},
    ]
    store.write([poll(T0 + turn * 15 * S, **values) for turn, values in enumerate(turns)])
    found = ask(
        engine, "SELECT outcome, detail, schema_status, cc_enabled, cc_ready, since, until FROM v_cvm_state ORDER BY since"
    )
    assert [tuple(row.values()) for row in found] == [
        ("ok", None, "match", True, False, stamp(T0), stamp(T0)),
        ("ok", None, "match", True, True, stamp(T0 + 15 * S), stamp(T0 + 30 * S)),
        ("timeout", "no answer in 10 s", None, None, None, stamp(T0 + 45 * S), stamp(T0 + 60 * S)),
        ("ok", None, "older", True, True, stamp(T0 + 75 * S), stamp(T0 + 75 * S)),
    ]


def test_cvms_are_listed_with_their_latest_stretch_and_cards(store: Store) -> None:
    second = replace(DEVICE, uuid="GPU-2", pci_bus_id="02:00.0")
    store.write([poll(T0, sample(T0), sample(T0, second)), poll(T0, cvm=SERVER, outcome="no_gpu", cc_ready=True)])
    store.write([poll(T0 + 15 * S, outcome="unreachable", detail="connection refused")])
    server, trainer = store.cvms()
    assert (server["vm_name"], server["outcome"], server["cc_ready"], server["gpus"]) == ("server", "no_gpu", True, 0)
    assert trainer == {
        "vmm": "rack1",
        "vm_id": "vm-a",
        "vm_name": "trainer",
        "app_id": "app-1",
        "instance_id": "instance-1",
        "outcome": "unreachable",
        "detail": "connection refused",
        "schema_status": None,
        "cc_enabled": None,
        "cc_ready": None,
        "since_ms": T0 + 15 * S,
        "until_ms": T0 + 15 * S,
        "gpus": 2,
    }


@pytest.mark.parametrize(
    ("state", "ages_s", "outcome"),
    [
        ("ok", (5, 5), "ok"),
        ("ok", (5, 5), "contested"),
        ("ok", (25, 5), "ok"),
        ("detached", (60, 5), "ok"),
        ("detached", (60, 5), "contested"),
        ("detached", (5, 5), "no_gpu"),
        ("silent", (60, 60), "ok"),
        ("silent", (5, 5), "timeout"),
    ],
)
def test_state_of_a_card(store: Store, engine: Engine, state: str, ages_s: tuple[int, int], outcome: str) -> None:
    sample_age_s, poll_age_s = ages_s
    store.set_stale_after(10)
    store.set_stale_after(30.5)
    now_ms = time.time_ns() // 1_000_000
    store.write([poll(now_ms - 90 * S, sample(now_ms - sample_age_s * S), cc_ready=False)])
    store.write([poll(now_ms - poll_age_s * S, outcome=outcome, cc_enabled=True)])
    assert ask(engine, "SELECT state, cc_enabled, cc_ready FROM v_gpu_latest") == [
        {"state": state, "cc_enabled": True, "cc_ready": None}
    ]
    assert [card["state"] for card in store.latest()] == [state]


def test_old_snapshot_that_is_still_served_is_stale(store: Store) -> None:
    store.set_stale_after(30)
    now_ms = time.time_ns() // 1_000_000
    store.write([poll(now_ms - 5 * S, sample(now_ms - 60 * S))])
    assert [card["state"] for card in store.latest()] == ["stale"]


def test_contested_is_the_place_without_uuid_and_not_its_neighbour(store: Store) -> None:
    now_ms = time.time_ns() // 1_000_000
    nameless = replace(DEVICE, uuid="", pci_bus_id="02:00.0")
    store.write([poll(now_ms, sample(now_ms), sample(now_ms, nameless), outcome="contested")])
    assert {card["uuid"]: card["state"] for card in store.latest()} == {DEVICE.uuid: "ok", None: "contested"}


def test_clock_that_was_ahead_does_not_keep_an_old_outcome_for_ever(store: Store) -> None:
    store.write([poll(T0), poll(T0 + 3600 * S)])
    store.write([poll(T0 + 10 * S, outcome="timeout"), poll(T0 + 20 * S)])
    store.write([poll(T0 + 3601 * S)])
    assert [(row["outcome"], row["until_ms"]) for row in store.cvms()] == [("ok", T0 + 3601 * S)]
    store.write([poll(T0 + 3602 * S, outcome="timeout")])
    assert [row["outcome"] for row in store.cvms()] == ["timeout"]


# Addresses, failures


@pytest.mark.parametrize(
    "url",
    [
        *("", "history.db", "mysql://host/db", "sqlite+aiosqlite:///x.db", "postgresql+psycopg2://host/db"),
        *("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://history.db", "sqlite:///file::memory:?uri=true"),
        *("sqlite:///x.db?mode=memory", "postgresql://host:port/db"),
    ],
)
def test_url_that_is_no_history_is_refused_in_one_line_that_names_it(url: str) -> None:
    with pytest.raises(StartError) as refusal:
        parse_database_url(url)
    assert repr(url) in str(refusal.value)
    assert str(refusal.value).endswith("allowed: sqlite:///FILE or postgresql://USER@HOST/DATABASE")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        *("postgresql://me:s3cret@127.0.0.1:1/db", "mysql://me:s3cret@host/db", "postgresql://me:s3cret@host:port/db"),
        *("postgresql://me:s3cret@with@at@127.0.0.1:1/db", "postgresql://127.0.0.1:1/db?user=me&password=s3cret"),
    ],
)
def test_password_is_never_shown(url: str) -> None:
    with pytest.raises(StartError) as refusal:
        Store(url).require_current()
    assert "s3cret" not in str(refusal.value)
    assert "at@" not in str(refusal.value)
    assert "***" in str(refusal.value)


def test_database_that_cannot_be_opened_is_one_line_at_start(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, but long enough to be taken for one by its size alone\n" * 20)
    for name in ("missing/history.db", "text.db", "."):
        with closing(Store(f"sqlite:///{tmp_path}/{name}")) as store, pytest.raises(StartError) as refusal:
            store.require_current()
        assert str(refusal.value).startswith(f"database sqlite:///{tmp_path}/{name}: ")
        assert "\n" not in str(refusal.value)


def told(store: Store) -> set[str]:
    """What each of the ways to begin says against it, without the name."""
    said = set()
    for begin in (store.require_current, store.upgrade, store.condition, store.require_file, store.revision):
        with pytest.raises(StartError) as refusal:
            begin()
        said.add(str(refusal.value).removeprefix(f"database {store.name}: "))
    return said


def test_a_folder_in_place_of_the_file_is_told_alike_by_all(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}")) as store:
        assert told(store) == {"this is a folder; name a file in it"}
    with closing(Store(f"sqlite:///{tmp_path}/missing/history.db")) as store:
        assert told(store) == {f"there is no folder {tmp_path}/missing"}


def test_a_read_only_mount_is_said_to_be_one(small_disk: Path) -> None:
    url = f"sqlite:///{small_disk}/history.db"
    with closing(Store(url)) as store:
        store.require_current()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    line = f"{small_disk} is mounted read-only, and SQLite writes beside a file even to read it; use a copy elsewhere"
    with closing(Store(url)) as store:
        for begin in (store.require_current, store.condition, store.upgrade):
            with pytest.raises(StartError, match=re.escape(f"database {store.name}: {line}")):
                begin()
        with pytest.raises(DatabaseAway, match=re.escape(line)):
            store.latest()


def test_batch_that_failed_left_nothing_and_is_stored_as_a_whole_later(store: Store, engine: Engine) -> None:
    store.write([poll(T0, sample(T0))])
    batch = [poll(T0 + 15 * S, sample(T0 + 15 * S)), poll(T0 + 15 * S, sample(T0 + 15 * S), cvm=SERVER, outcome="contested")]
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE gpu_latest RENAME TO hidden"))
    with pytest.raises(DatabaseAway, match=r"^database: the database cannot be read or written, .*gpu_latest"):
        store.write(batch)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE hidden RENAME TO gpu_latest"))
    assert [(row["vm_id"], row["until_ms"]) for row in store.cvms()] == [("vm-a", T0)]
    assert [row[0] for row in stays(engine)] == ["vm-a"]
    assert store.write(batch) == 1
    assert column(engine, "SELECT sampled_at_ms FROM v_gpu_latest") == [T0 + 15 * S]
    assert len(store.cvms()) == 2


def test_server_that_cannot_be_reached_while_running_is_a_database_away() -> None:
    with closing(Store("postgresql://127.0.0.1:1/db")) as store:
        for call in (store.ping, store.latest, lambda: store.write([poll(T0)])):
            with pytest.raises(DatabaseAway, match=r"^database: [^\n]*127\.0\.0\.1:1/db: [^\n]*refused[^\n]*$"):
                call()


def test_database_that_is_away_is_said_so_and_used_again_when_back(store: Store, database_url: str) -> None:
    store.ping()
    if database_url.startswith("sqlite"):
        with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"))) as other:
            other.execute("ALTER TABLE setting RENAME TO hidden")
            with pytest.raises(DatabaseAway, match="no such table: setting"):
                store.ping()
            other.execute("ALTER TABLE hidden RENAME TO setting")
    else:
        with psycopg.connect(database_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    store.ping()
    assert store.write([poll(T0, sample(T0))]) == 1


def test_sqlite_file_held_by_another_writer_is_waited_for(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/history.db")) as store:
        store.require_current()
        other = sqlite3.connect(tmp_path / "history.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.3, other.execute, ["COMMIT"])
        release.start()
        assert store.latest() == []
        assert store.write([poll(T0, sample(T0))]) == 1
        release.join()
        other.close()


def test_sqlite_is_in_wal_mode(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/history.db")) as store:
        store.require_current()
        with closing(sqlite3.connect(tmp_path / "history.db")) as other:
            assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.fixture
def refusing(engine: Engine, store: Store) -> None:
    """A schema that someone altered: it refuses a vm_id of "bad"."""
    store.ping()
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            refuse = "SELECT RAISE(ABORT, 'no bad ones')"
            connection.execute(text(f"CREATE TRIGGER t BEFORE INSERT ON cvm WHEN new.vm_id = 'bad' BEGIN {refuse}; END"))
        else:
            connection.execute(text("ALTER TABLE cvm ADD CONSTRAINT no_bad_ones CHECK (vm_id <> 'bad')"))


@pytest.mark.usefixtures("refusing")
def test_rows_that_will_never_be_stored_are_told_from_a_database_that_is_away(store: Store) -> None:
    with pytest.raises(Unstorable, match=r"^unstorable: the database refuses these rows[^\n]*no.bad.ones"):
        store.write([poll(T0, sample(T0)), poll(T0, cvm=Cvm("rack1", "bad"))])
    assert store.write([poll(T0, sample(T0))]) == 1


def test_value_that_the_driver_cannot_hand_over_is_unstorable(store: Store) -> None:
    too_large = replace(DEVICE, memory_total_bytes=2**70)
    with pytest.raises(Unstorable):
        store.write([poll(T0, sample(T0, too_large))])
    assert store.write([poll(T0, sample(T0))]) == 1


def kind_of_failure(store: Store) -> str:
    with pytest.raises(DatabaseAway) as failure:
        store.write([poll(T0, sample(T0))])
    return failure.value.kind


def test_what_keeps_a_postgresql_away_is_named(postgres_url: str) -> None:
    with closing(Store("postgresql://127.0.0.1:1/db")) as store:
        assert kind_of_failure(store) == "unreachable"
    with closing(Store(postgres_url)) as store, psycopg.connect(postgres_url, autocommit=True) as other:
        assert kind_of_failure(store) == "schema"
        store.require_current()
        store.write([poll(T0 - 60 * S, sample(T0 - 60 * S))])
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        database = make_url(postgres_url).database
        other.execute(f'ALTER DATABASE "{database}" SET default_transaction_read_only = on'.encode())
        assert kind_of_failure(store) == "read_only"
        other.execute(f'ALTER DATABASE "{database}" RESET default_transaction_read_only'.encode())
        assert store.write([poll(T0, sample(T0))]) == 1
        with other.transaction():
            other.execute("LOCK TABLE gpu_sample")
            began = time.monotonic()
            with pytest.raises(DatabaseAway) as failure:
                store.write([poll(T0 + 15 * S, sample(T0 + 15 * S))])
        assert failure.value.kind == "locked"
        assert 1.5 < time.monotonic() - began < 4


def test_who_waited_for_a_rollup_is_late_for_it_whatever_the_databases_isolation(postgres_url: str) -> None:
    database = make_url(postgres_url).database
    with closing(Store(postgres_url)) as store, ThreadPoolExecutor() as pool, psycopg.connect(postgres_url) as rollup:
        store.require_current()
        rollup.execute(f"ALTER DATABASE \"{database}\" SET default_transaction_isolation = 'repeatable read'".encode())
        rollup.commit()
        rollup.execute("SELECT pg_advisory_xact_lock(%s)", (ROLLUP_LOCK,))
        rollup.execute("UPDATE progress SET closed_to_ms = %s WHERE resolution = '5m'", (T0 + 600 * S,))
        written = pool.submit(store.write, [poll(T0, sample(T0))])
        until_waiting(postgres_url)
        rollup.commit()
        assert written.result() == 1
        assert rollup.execute("SELECT resolution FROM rollup_due").fetchall() == [("5m",)]


def test_what_keeps_an_sqlite_file_away_is_named(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    with closing(Store(f"sqlite:///{file}")) as store, closing(sqlite3.connect(file, isolation_level=None)) as other:
        assert kind_of_failure(store) == "schema"
        store.require_current()
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        assert kind_of_failure(store) == "locked"
        assert 1.5 < time.monotonic() - began < 4
        other.execute("ROLLBACK")
    with closing(Store(f"sqlite:///{tmp_path}/missing/history.db")) as store:
        assert kind_of_failure(store) == "unreachable"


def test_two_writers_of_the_same_cards_do_not_hinder_each_other(postgres_url: str) -> None:
    """Two aggregators that both believe that a VMM is theirs, for a moment."""
    cvms = [Cvm("rack1", f"vm-{number}") for number in range(30)]
    devices = [replace(DEVICE, uuid=f"GPU-{number}") for number in range(len(cvms))]
    failures: list[Exception] = []

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with closing(Store(postgres_url, max_lag_s=0)) as store:
            for turn in range(12):
                at = T0 + turn * 15 * S + seed * 3 * S
                batch = [poll(at, sample(at, device), cvm=cvm) for cvm, device in zip(cvms, devices, strict=True)]
                chance.shuffle(batch)
                try:
                    store.write(batch)
                except DatabaseAway as error:
                    failures.append(error)

    with closing(Store(postgres_url)) as store:
        store.require_current()
    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
