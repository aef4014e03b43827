"""What an answer of the HTTP API costs, beside the best SQL for the same figures, on a database of bench/make_history.py.

    python -m bench.queries --db URL [--rounds 20]

A line a question: the least time of the whole answer (SQL, buckets, JSON), of the bare SQL, and how many times as long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from pydantic_core import to_json
from sqlalchemy import text

from aggregator import answers, parameters
from aggregator.answers import Answer
from aggregator.database import READ_LIMIT_S, Reading
from aggregator.export import export_chunks
from aggregator.parameters import DAY_MS, HOUR_MS
from aggregator.store import Store
from gpuwire.access import EVERYTHING

GAUGES = ("utilization_gpu", "memory_used_bytes", "temperature_c", "power_usage_mw")
_FIGURES = ", ".join(f"avg({name}), min({name}), max({name})" for name in GAUGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--db", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    with closing(Store(asked.db)) as store:
        store.require_current(upgrade_empty=False)
        measure(store, asked.rounds)


def measure(store: Store, rounds: int) -> None:
    with store.reading() as reading:
        (samples,) = reading.tuples(text("SELECT sum(samples) FROM gpu_1h"))[0]
        gpu_id, uuid, end_ms = reading.tuples(
            text("SELECT g.gpu_id, g.uuid, s.sampled_at_ms FROM gpu_latest AS s JOIN gpu AS g ON g.gpu_id = s.gpu_id LIMIT 1")
        )[0]
    print(f"{store.name}: {samples:,} samples, the least of {rounds}")

    def history(span_ms: int, **more: Any) -> Callable[[Reading], Answer]:
        given = {"uuid": uuid, "start": str((end_ms - span_ms) // 1000), "end": str(end_ms // 1000), **more}
        asked = parameters.GpuHistory.model_validate(given)
        return lambda reading: answers.gpu_history(reading, EVERYTHING, asked, end_ms)

    def by_bucket(span_ms: int, step_ms: int) -> str:
        return history_sql(gpu_id, end_ms - span_ms, end_ms, step_ms)

    def summary(span_ms: int) -> Callable[[Reading], Answer]:
        asked = parameters.Summary.model_validate({"start": str((end_ms - span_ms) // 1000), "end": str(end_ms // 1000)})
        return lambda reading: answers.summary(reading, EVERYTHING, asked, end_ms)

    def fleet(span_ms: int) -> str:
        return f"SELECT sum(covered_ms), sum(energy_uj) FROM gpu_1h WHERE bucket_ms >= {end_ms - span_ms}"

    page = parameters.Gpus.model_validate({"limit": "1000"})
    questions: list[tuple[str, Callable[[Reading], Answer], str]] = [
        ("24 h of a card at 5 min", history(DAY_MS, step="5m"), by_bucket(DAY_MS, 300_000)),
        ("24 h of a card at 2 min, samples", history(DAY_MS, step="2m"), by_bucket(DAY_MS, 120_000)),
        ("24 h of a card at 5 min, p95", history(DAY_MS, step="5m", agg="p95"), by_bucket(DAY_MS, 300_000)),
        ("30 d of a card at 1 h", history(30 * DAY_MS, step="1h"), by_bucket(30 * DAY_MS, HOUR_MS)),
        ("the fleet's 24 h", summary(DAY_MS), fleet(DAY_MS)),
        ("the fleet's 30 d", summary(30 * DAY_MS), fleet(30 * DAY_MS)),
        (
            "all cards",
            lambda reading: answers.gpus(reading, EVERYTHING, page, end_ms),
            "SELECT * FROM v_gpu_latest ORDER BY uuid",
        ),
    ]
    print(f"{'':34} {'answer':>9} {'SQL':>9} {'times':>6}")
    for name, answer, sql in questions:
        whole, bare = least_ms(store, answer, sql, rounds)
        print(f"{name:34} {whole:6.1f} ms {bare:6.1f} ms {whole / bare:6.2f}")
    export = parameters.Export.model_validate({"start": str((end_ms - DAY_MS) // 1000), "format": "csv"})
    began, rows = time.monotonic(), 0
    for chunk in export_chunks(store, EVERYTHING, export, end_ms):
        rows += chunk.count(b"\n")
    print(f"export of 24 h: {rows:,} rows, {rows / (time.monotonic() - began):,.0f} rows/s")


def history_sql(gpu_id: int, start_ms: int, end_ms: int, step_ms: int) -> str:
    """What the history of a card says at least, from samples."""
    return (
        f"SELECT sampled_at_ms / {step_ms} * {step_ms}, {_FIGURES} FROM gpu_sample WHERE gpu_id = {gpu_id}"
        f" AND sampled_at_ms >= {start_ms} AND sampled_at_ms < {end_ms} GROUP BY 1 ORDER BY 1"
    )


def least_ms(store: Store, answer: Callable[[Reading], Answer], sql: str, rounds: int) -> tuple[float, float]:
    """Of the answer and of the SQL, in turns: what else the machine does is shared."""
    times: tuple[list[float], list[float]] = ([], [])
    work = (lambda reading: to_json(answer(reading).reply), lambda reading: reading.tuples(text(sql)))
    for _ in range(rounds):
        for one, took in zip(work, times, strict=True):
            began = time.perf_counter()
            with store.reading(6 * READ_LIMIT_S) as reading:
                one(reading)
            took.append((time.perf_counter() - began) * 1000)
    whole, bare = map(min, times)
    return whole, bare


if __name__ == "__main__":
    main()
