"""Calls to guests side by side: how many at once, and several guests in one call. Neither lets one who hangs delay another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aggregator.vmm_client import VmmClient
from gpuwire.errors import DeadlineExceeded, TelemetryError, Unreachable
from gpuwire.http_client import HttpReply

log = logging.getLogger(__name__)

PATIENCE = 0.1


class Slots:
    """Bounds the calls that are at work over all VMMs. A call that has waited for a tenth of its time no longer counts: it
    costs nothing but its socket, and a hundred hung guests would else take the places of all others. Where calls wait for their
    place, the VMMs take turns: one whose guests all hang keeps no other one's waiting."""

    def __init__(self, concurrency: int, timeout_s: float) -> None:
        self._free = concurrency  # 0 while anyone waits
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of turns
        self._patience_s = timeout_s * PATIENCE

    @asynccontextmanager
    async def taken(self, vmm: str) -> AsyncIterator[None]:
        await self._acquire(vmm)
        held = [self._release]

        def give_back() -> None:
            while held:
                held.pop()()

        patience = asyncio.get_running_loop().call_later(self._patience_s, give_back)
        try:
            yield
        finally:
            patience.cancel()
            give_back()

    async def _acquire(self, vmm: str) -> None:
        if self._free:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(vmm, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._release()  # it came in the same moment
            raise

    def _release(self) -> None:
        while self._waiting:
            vmm = next(iter(self._waiting))
            places = self._waiting.pop(vmm)
            place = places.popleft()
            if places:
                self._waiting[vmm] = places
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


class HostCall:
    """One call for several VMs of a VMM, with a promise for each. After `run` all promises are kept."""

    def __init__(self, client: VmmClient, vm_ids: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        self._client = client
        self._answers: dict[str, asyncio.Future[HttpReply | TelemetryError | None]] = {
            vm_id: loop.create_future() for vm_id in vm_ids
        }
        self.offered = True
        self.started_s = time.perf_counter()

    async def run(self, slots: Slots) -> None:
        failure: TelemetryError | None = None
        try:
            async with slots.taken(self._client.vmm.name):
                self.started_s = time.perf_counter()
                self.offered = await self._client.gpu_infos(list(self._answers), self._hear)
        except (DeadlineExceeded, Unreachable) as error:
            failure = error
        except TelemetryError as error:
            # The guests not heard are asked one by one: what broke the stream may be another one's doing.
            self.offered = any(answer.done() for answer in self._answers.values())
            log.debug("call for a whole host broke off: reason=%s", error)
        except Exception:
            log.exception("call for a whole host failed by a fault of the aggregator")
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_result(failure)

    async def answer(self, vm_id: str) -> HttpReply | TelemetryError | None:
        """None where the VM has to be asked by itself: the VMM has no such call, or it brought none for this VM."""
        return await self._answers[vm_id]

    def _hear(self, vm_id: str, answer: HttpReply | TelemetryError) -> None:
        """The first word of a VM counts, and only that of one that was asked."""
        promise = self._answers.get(vm_id)
        if promise is not None and not promise.done():
            promise.set_result(answer)
