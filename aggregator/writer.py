"""Between the pollers and the database: collects polls and writes them in batches, one transaction each, in one thread."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from aggregator.errors import DatabaseAway
from aggregator.rows import Poll
from aggregator.store import Store

log = logging.getLogger(__name__)

BATCH_AFTER_S = 1.0
BATCH_SIZE = 2000
RETRY_S = 2.0
QUEUE_SIZE = 100_000


class Writer:
    """`add` never blocks. While the database is away polls wait here; beyond QUEUE_SIZE the oldest are dropped and counted."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: deque[Poll] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self.dropped = 0
        self.database_error = ""

    def add(self, poll: Poll) -> None:
        if len(self._queue) >= QUEUE_SIZE:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append(poll)

    async def run(self) -> None:
        """Writes for ever."""
        while True:
            await asyncio.sleep(RETRY_S if self.database_error else BATCH_AFTER_S)
            while self._queue and await self._write_batch():
                pass

    async def close(self) -> None:
        """Writes what is left, once."""
        while self._queue and await self._write_batch():
            pass
        if self._queue:
            log.error("polls lost at the end: polls=%d reason=%s", len(self._queue), self.database_error)
        self._thread.shutdown()

    async def _write_batch(self) -> bool:
        batch = [self._queue.popleft() for _ in range(min(BATCH_SIZE, len(self._queue)))]
        try:
            rows = await asyncio.get_running_loop().run_in_executor(self._thread, self._store.write, batch)
        except DatabaseAway as error:
            self._queue.extendleft(reversed(batch))
            if not self.database_error:
                log.warning("database is away, polls wait: waiting=%d reason=%s", len(self._queue), error)
            self.database_error = str(error)
            return False
        if self.database_error:
            log.info("database is back: waiting=%d dropped=%d", len(self._queue), self.dropped)
        self.database_error = ""
        log.debug("written: polls=%d rows=%d", len(batch), rows)
        return True
