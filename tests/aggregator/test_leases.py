"""Several aggregators on one database: who polls what, and what each knows of what the others wrote."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from aggregator.bulk import SILENT_CLIENT_S
from aggregator.errors import DatabaseAway
from aggregator.identity import Identity
from aggregator.leases import Holder, Leases, this_process, vmm_lease
from aggregator.rows import Poll
from aggregator.store import FORGET_AFTER_S, Leased, Store
from gpuwire.service import in_background
from tests.aggregator.test_store import DEVICE, SERVER, T0, TRAINER, S, ask, column, engine, poll, sample, stamp, stays

__all__ = ["engine"]

A, B = "host-a/1 boot-a.1.1 100", "host-b/2 boot-b.1.1 200"
STRETCHES = "SELECT outcome, since, until FROM v_cvm_state WHERE vm_id = 'vm-a' ORDER BY since"


def nobody_is_gone(_holder: str) -> bool:
    return False


def take(store: Store, holder: str, *names: str, lease_s: float = 20, gone: str = "", expired: bool = True) -> Leased:
    return store.take_leases(holder, names, lease_s, lambda other: other == gone, expired=expired)


@pytest.fixture
def other(database_url: str, store: Store) -> Iterator[Store]:
    """Another aggregator's store on the same database."""
    assert store.revision() is not None
    with closing(Store(database_url, max_lag_s=0)) as other:
        yield other


# Leases in the database


def test_who_is_first_has_it_until_it_is_given_up(store: Store, other: Store) -> None:
    assert take(store, A, "vmm:1", "vmm:2") == Leased(frozenset({"vmm:1", "vmm:2"}), frozenset({"vmm:1", "vmm:2"}), {})

    theirs = take(other, B, "vmm:1", "vmm:3")

    assert (theirs.held, theirs.fresh) == ({"vmm:3"}, {"vmm:3"})
    assert {name: holder for name, (holder, _) in theirs.others.items()} == {"vmm:1": A, "vmm:2": A}
    assert all(19 < left_s <= 20 for _, left_s in theirs.others.values())
    store.release_leases(A, ["vmm:1"])
    assert take(other, B, "vmm:1", "vmm:2", "vmm:3").fresh == {"vmm:1"}
    store.release_leases(A)
    assert take(other, B, "vmm:1", "vmm:2", "vmm:3").fresh == {"vmm:2"}


async def test_one_that_is_renewed_stays_and_one_that_runs_out_is_taken(store: Store, other: Store) -> None:
    take(store, A, "vmm:1", lease_s=2)
    await asyncio.sleep(1)
    assert take(store, A, "vmm:1", lease_s=2.5) == Leased(frozenset({"vmm:1"}), frozenset(), {})
    await asyncio.sleep(1.1)
    assert not take(other, B, "vmm:1").held
    await asyncio.sleep(1.5)
    late = take(other, B, "vmm:1", expired=False)
    assert not late.held and late.others["vmm:1"][1] < 0, "left to its holder, who may come back"
    assert take(other, B, "vmm:1").fresh == {"vmm:1"}
    assert not take(store, A, "vmm:1").held


async def test_one_that_ran_out_and_was_taken_by_nobody_goes_on(store: Store) -> None:
    take(store, A, "vmm:1", lease_s=0.05)
    await asyncio.sleep(0.1)
    assert take(store, A, "vmm:1") == Leased(frozenset({"vmm:1"}), frozenset(), {})


def test_one_that_another_had_in_between_is_fresh(store: Store, other: Store) -> None:
    take(store, A, "vmm:1", lease_s=0)
    take(other, B, "vmm:1", gone=A)
    other.release_leases(B)
    assert take(store, A, "vmm:1").fresh == {"vmm:1"}


def test_one_whose_holder_is_gone_is_taken_at_once(store: Store, other: Store) -> None:
    take(store, A, "vmm:1")
    assert not take(other, B, "vmm:1").held
    assert take(other, B, "vmm:1", gone=A).fresh == {"vmm:1"}


def test_a_clock_that_is_set_back_leaves_no_lease_for_ever(tmp_path: Path) -> None:
    now_s = 1_800_000_000.0
    with closing(Store(f"sqlite:///{tmp_path}/history.db", wall_clock=lambda: now_s)) as store:
        store.require_current()
        take(store, A, "vmm:1")
        now_s -= 10
        assert not take(store, B, "vmm:1").held
        now_s -= 3600
        assert take(store, B, "vmm:1").held


def test_of_many_who_want_the_same_at_once_each_lease_has_one(database_url: str, store: Store) -> None:
    assert not take(store, A).held
    names = [f"vmm:{number}" for number in range(700)]
    found: dict[str, Leased] = {}
    together = threading.Barrier(4)

    def one(holder: str) -> None:
        with closing(Store(database_url)) as own:
            # Each in its own order.
            wanted = sorted(names, key=lambda name: hash((holder, name)))
            together.wait()
            # A busy machine may keep one waiting for longer than it waits.
            while holder not in found:
                with suppress(DatabaseAway):
                    found[holder] = own.take_leases(holder, wanted, 20, nobody_is_gone)

    threads = [threading.Thread(target=one, args=(f"host/{number} boot 1",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for leased in found.values() for name in leased.held) == sorted(names)


# Holders


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield process


def holder_of(process: subprocess.Popen[bytes]) -> Holder:
    started = Path(f"/proc/{process.pid}/stat").read_text().split()[21]
    return replace(this_process(), pid=process.pid, started=started)


def test_a_holder_is_outlived_once_its_process_has_ended(child: subprocess.Popen[bytes]) -> None:
    holder = str(holder_of(child))
    assert not this_process().outlived(holder)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert this_process().outlived(holder)


def test_a_pid_that_another_process_has_now_is_not_the_holder(child: subprocess.Popen[bytes]) -> None:
    assert this_process().outlived(str(replace(holder_of(child), started="1")))


@pytest.mark.parametrize("elsewhere", [{"host": "another-host"}, {"home": "another-boot.1.1"}])
def test_a_holder_that_ran_elsewhere_may_run_yet(child: subprocess.Popen[bytes], elsewhere: dict[str, str]) -> None:
    holder = replace(holder_of(child), **elsewhere)  # type: ignore[arg-type]
    child.kill()
    child.wait()
    assert not this_process().outlived(str(holder))


def test_what_is_no_holders_name_may_be_anybodys() -> None:
    assert not any(this_process().outlived(text) for text in ("", "host-a", "host/1 home", str(this_process())))


def test_where_proc_tells_nothing_a_holder_is_like_no_other(tmp_path: Path) -> None:
    one, two = this_process(tmp_path), this_process(tmp_path)
    assert one.home != two.home
    assert (one.pid, str(one) == str(two)) == (os.getpid(), False)


def test_a_proc_of_other_namespaces_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to("1")
    (tmp_path / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    (tmp_path / "sys").symlink_to("/proc/sys")
    assert this_process(tmp_path).started == "-"


# What another one wrote


def test_polls_of_another_aggregator_in_between_are_seen(store: Store, other: Store, engine: Engine) -> None:
    store.write([poll(T0, sample(T0))])
    other.write([poll(T0 + 40 * S, outcome="timeout")])
    store.others_wrote(["rack1"])
    store.write([poll(T0 + 80 * S, sample(T0 + 80 * S))])
    assert [tuple(row.values()) for row in ask(engine, STRETCHES)] == [
        ("ok", stamp(T0), stamp(T0)),
        ("timeout", stamp(T0 + 40 * S), stamp(T0 + 40 * S)),
        ("ok", stamp(T0 + 80 * S), stamp(T0 + 80 * S)),
    ]
    assert [cvm["outcome"] for cvm in store.cvms()] == ["ok"]


def test_card_that_was_behind_another_aggregators_vmm_and_came_back_has_three_stays(
    store: Store, other: Store, engine: Engine
) -> None:
    far = replace(SERVER, vmm="rack2")
    store.write([poll(T0, sample(T0))])
    other.write([poll(T0 + 60 * S, sample(T0 + 60 * S), cvm=far)])
    assert [stay["vmm"] for stay in store.stays_of_cards_of(["rack2"], T0)] == ["rack1", "rack2"]
    store.write([poll(T0 + 120 * S, sample(T0 + 120 * S))])
    assert [(vm_id, first, last) for vm_id, *_, first, last in stays(engine)] == [
        ("vm-a", stamp(T0), stamp(T0)),
        ("vm-b", stamp(T0 + 60 * S), stamp(T0 + 60 * S)),
        ("vm-a", stamp(T0 + 120 * S), stamp(T0 + 120 * S)),
    ]


def test_time_in_which_nobody_had_the_lease_lies_in_no_stretch(store: Store, engine: Engine) -> None:
    store.write([poll(T0), poll(T0, cvm=SERVER)])
    store.others_wrote(["rack1"])
    store.write([poll(T0 + 300 * S)])
    store.write([poll(T0 + 301 * S)])
    assert column(engine, STRETCHES) == ["ok", "ok"]


def test_time_that_one_confirmed_last_does_not_move_back_what_the_other_wrote(
    database_url: str, store: Store, engine: Engine
) -> None:
    """The one who lost the lease has not written yet how far it got."""
    with closing(Store(database_url, max_lag_s=3600)) as before:
        before.write([poll(T0, sample(T0))])
        before.write([poll(T0 + 15 * S, sample(T0 + 15 * S))])
        store.write([poll(T0 + 30 * S, sample(T0 + 30 * S))])
        before.others_wrote(["rack1"])
    assert column(engine, "SELECT until FROM v_cvm_state") == [stamp(T0 + 30 * S)]
    assert [last for *_, last in stays(engine)] == [stamp(T0 + 30 * S)]


def test_what_waited_in_a_spool_goes_in_at_its_time_among_what_the_other_wrote(
    store: Store, other: Store, engine: Engine
) -> None:
    polls = [poll(at, sample(at)) for at in range(T0, T0 + 150 * S, 15 * S)]
    store.write(polls[:1])
    other.write(polls[4:])
    store.others_wrote(["rack1"])
    store.write(polls[1:7])
    assert column(engine, "SELECT sampled_at_ms FROM v_gpu_samples ORDER BY 1") == [one.polled_at_ms for one in polls]
    assert len(stays(engine)) == 1
    until = column(engine, "SELECT until FROM v_cvm_state")
    assert max(until) == stamp(T0 + 135 * S)
    assert [cvm["until_ms"] for cvm in store.cvms()] == [T0 + 135 * S]
    other.write([poll(T0 + 150 * S, sample(T0 + 150 * S))])
    assert column(engine, "SELECT until FROM v_cvm_state ORDER BY 1")[-1] == stamp(T0 + 150 * S)


def test_writer_that_was_stopped_asks_what_was_written_meanwhile(database_url: str, other: Store, engine: Engine) -> None:
    now_s = 1000.0
    with closing(Store(database_url, clock=lambda: now_s, max_lag_s=0)) as store:
        store.write([poll(T0, sample(T0))])
        other.write([poll(T0 + 40 * S, outcome="timeout")])
        now_s += FORGET_AFTER_S + 1
        store.write([poll(T0 + 80 * S, sample(T0 + 80 * S))])
    assert column(engine, STRETCHES) == ["ok", "timeout", "ok"]


def test_one_that_writes_without_a_lease_is_seen_at_the_next_renewal(database_url: str, store: Store, engine: Engine) -> None:
    """As `gpu-aggregator poll` does."""
    take(store, A, "vmm:rack1")
    store.write([poll(T0, sample(T0))])
    for number, at in enumerate((T0 + 5 * S, T0 + 35 * S)):
        with closing(Store(database_url)) as other:
            other.write([poll(at, outcome="timeout")])
            other.leave_word(f"host/{number} boot 1")
        assert "poll" not in take(store, A, "vmm:rack1").others
        store.write([poll(at + 10 * S, sample(at + 10 * S))])
        assert [cvm["outcome"] for cvm in store.cvms()] == ["ok"]
    assert column(engine, STRETCHES) == ["ok", "timeout", "ok", "timeout", "ok"]


def test_client_that_stops_amid_its_batch_holds_up_its_successor_for_seconds(postgres_url: str) -> None:
    with closing(Store(postgres_url)) as store:
        store.require_current()
        store.write([poll(T0)])
    script = f"""
import time
from sqlalchemy import create_engine, text
from aggregator.bulk import bulk_of
from aggregator.database import parse_database_url
with create_engine(parse_database_url({postgres_url!r})).begin() as connection:
    bulk_of(connection).begin()
    connection.execute(text("UPDATE cvm SET vm_name = 'held'"))
    print("holds", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as stopped:
        assert stopped.stdout is not None and stopped.stdout.readline() == b"holds\n"
        stopped.send_signal(signal.SIGSTOP)
        try:
            with closing(Store(postgres_url)) as store:
                renamed = [poll(T0 + 15 * S, cvm=replace(TRAINER, vm_name="renamed"))]
                with pytest.raises(DatabaseAway):
                    store.write(renamed)
                wait_until(lambda: wrote(store, renamed), SILENT_CLIENT_S)
        finally:
            stopped.kill()


def wrote(store: Store, polls: list[Poll]) -> bool:
    try:
        store.write(polls)
    except DatabaseAway:
        return False
    return True


def wait_until(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline


# The aggregators


LEASE_S, RENEW_S = 2.0, 0.2


class Aggregator:
    def __init__(self, store: Store, name: str, lease_s: float = LEASE_S) -> None:
        self.identity = Identity(15)
        self.leases = Leases(store, self.identity, Holder(name, 1, "boot", "1"), lease_s=lease_s, renew_s=RENEW_S)

    @asynccontextmanager
    async def running(self, *vmms: str) -> AsyncIterator[Leases]:
        """Not given up at the end, as if it was killed."""
        for vmm in vmms:
            self.leases.want(vmm_lease(vmm))
        async with in_background(self.leases.run()):
            await self.leases.renewed()
            yield self.leases


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_vmms_of_one_that_dies_are_taken_over_when_their_lease_is_over(store: Store, other: Store) -> None:
    a, b = Aggregator(store, "a"), Aggregator(other, "b")
    async with b.running():
        async with a.running("1", "2"):
            for vmm in ("1", "2"):
                b.leases.want(vmm_lease(vmm))
            await asyncio.sleep(1.5 * LEASE_S)
            assert a.leases.holds_now("vmm:1") and not b.leases.holds("vmm:1")
            assert b.leases.other_holder("vmm:1") == "a/1"
        died = asyncio.get_running_loop().time()
        await until(lambda: b.leases.holds_now("vmm:1") and b.leases.holds_now("vmm:2"))
        assert LEASE_S / 2 < asyncio.get_running_loop().time() - died < LEASE_S + 1


async def test_what_is_given_up_is_taken_at_once(store: Store, other: Store) -> None:
    a, b = Aggregator(store, "a", lease_s=60), Aggregator(other, "b", lease_s=60)
    async with a.running("1", "2"), b.running():
        b.leases.want("vmm:1")
        b.leases.want("vmm:2")
        a.leases.drop("vmm:1")
        await until(lambda: b.leases.holds("vmm:1"))
        assert a.leases.holds("vmm:2")
    async with b.running():
        await a.leases.close()
        await until(lambda: b.leases.holds("vmm:2"))


async def test_while_the_database_is_away_each_keeps_what_it_held_and_afterwards_too(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with closing(Store(f"sqlite:///{path}")) as store, closing(Store(f"sqlite:///{path}")) as other:
        store.require_current()
        a, b = Aggregator(store, "a"), Aggregator(other, "b")
        async with a.running("1"), b.running("2"):
            a.leases.want("vmm:2")
            b.leases.want("vmm:1")
            with closing(sqlite3.connect(path, isolation_level=None)) as locking:
                locking.execute("BEGIN IMMEDIATE")
                await until(lambda: not a.leases.holds_now("vmm:1") and not b.leases.holds_now("vmm:2"))
                assert a.leases.holds("vmm:1") and b.leases.holds("vmm:2")
                # A renewal gives up after two seconds.
                await asyncio.sleep(2.5)
            await until(lambda: a.leases.holds_now("vmm:1") and b.leases.holds_now("vmm:2"))
            assert not a.leases.holds("vmm:2") and not b.leases.holds("vmm:1")


async def test_with_a_vmm_comes_what_its_last_aggregator_knew_of_its_cards(store: Store, other: Store) -> None:
    a, b = Aggregator(store, "a"), Aggregator(other, "b")
    async with a.running("rack1"), b.running():
        store.write([poll(T0, sample(T0))])
        b.leases.want("vmm:rack1")
        assert b.identity.holds(TRAINER, [DEVICE.uuid]) == 0
        a.leases.drop("vmm:rack1")
        await until(lambda: b.leases.holds("vmm:rack1"))
        assert b.identity.holds(TRAINER, [DEVICE.uuid]) == 1


async def test_whose_card_it_is_behind_another_aggregators_vmm_is_heard_of(store: Store, other: Store) -> None:
    now_ms = time.time_ns() // 1_000_000
    a, b = Aggregator(store, "a"), Aggregator(other, "b")
    async with a.running("rack1"):
        store.write([poll(now_ms, sample(now_ms))])
        async with b.running("rack2"):
            assert b.identity.holds(TRAINER, [DEVICE.uuid]) == 1
