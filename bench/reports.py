"""What each answer about a fleet costs, beside a floor: reading the same rows, on a database of bench/make_history.py.

    python -m bench.reports --db URL [--rounds 5]

A line a question, through the API's own code (SQL, figures, JSON): the median of the whole answer, of the floor's SQL, and how
many times as long. The floor of a history is the best SQL for the same figures; where an answer is made of buckets, count(*) of
those; else the rows of the view, or the table, that has what is asked for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing

from pydantic_core import to_json
from sqlalchemy import text

from aggregator import answers, parameters
from aggregator.answers import Answer
from aggregator.database import READ_LIMIT_S, Reading
from aggregator.parameters import DAY_MS, HOUR_MS
from aggregator.reports import prepare, reports
from aggregator.reports.api import OneReport, one_report
from aggregator.store import Store
from bench.queries import history_sql
from gpuwire.access import EVERYTHING

SPANS = {"24 h": DAY_MS, "7 d": 7 * DAY_MS}
# What the reports that ask no buckets are made of.
ROWS = {
    "cc": "SELECT * FROM v_cvm_state",
    "errors": "SELECT * FROM gpu_error",
    "placement": "SELECT * FROM v_gpu_tenancy",
    "schema": "SELECT * FROM v_cvm_state",
    "stale": "SELECT * FROM v_cvm_state",
}

Question = tuple[str, Callable[[Reading], Answer], str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--db", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with closing(Store(asked.db)) as store:
        store.require_current(upgrade_empty=False)
        measure(store, asked.rounds)


def measure(store: Store, rounds: int) -> None:
    with store.reading() as reading:
        cards, end_ms = reading.tuples(text("SELECT count(*), max(sampled_at_ms) FROM gpu_latest"))[0]
        questions = [*of_the_fleet(reading, end_ms), *of_reports(reading, end_ms)]
    print(f"{store.name}: {cards:,} cards, the median of {rounds}")
    print(f"{'':34} {'answer':>10} {'floor':>10} {'times':>6}")
    for name, answer, floor in questions:
        whole, bare = median_ms(store, answer, floor, rounds)
        print(f"{name:34} {whole:7.1f} ms {bare:7.1f} ms {whole / bare:6.2f}", flush=True)


def of_the_fleet(reading: Reading, end_ms: int) -> Iterator[Question]:
    gpu_id, uuid = reading.tuples(text("SELECT gpu_id, uuid FROM gpu WHERE uuid IS NOT NULL ORDER BY gpu_id LIMIT 1"))[0]
    day = {"start": str((end_ms - DAY_MS) // 1000), "end": str(end_ms // 1000)}
    history = parameters.GpuHistory.model_validate({"uuid": uuid, "step": "5m", **day})
    page = parameters.Gpus.model_validate({"limit": "1000"})
    summary, heatmap = parameters.Summary.model_validate(day), parameters.Heatmap.model_validate(day)
    yield (
        "history of a card, 24 h at 5 min",
        lambda reading: answers.gpu_history(reading, EVERYTHING, history, end_ms),
        history_sql(gpu_id, end_ms - DAY_MS, end_ms, 5 * 60_000),
    )
    latest = "SELECT * FROM v_gpu_latest ORDER BY uuid LIMIT 1000"
    yield "gpus", lambda reading: answers.gpus(reading, EVERYTHING, page, end_ms), latest
    hours = buckets_in({"1h": (end_ms // HOUR_MS * HOUR_MS - DAY_MS, end_ms)})
    yield "summary, 24 h", lambda reading: answers.summary(reading, EVERYTHING, summary, end_ms), hours
    fives = buckets_in({"5m": (end_ms - DAY_MS, end_ms)})
    yield "heatmap, 24 h at 15 min", lambda reading: answers.heatmap(reading, EVERYTHING, heatmap, end_ms), fives


def of_reports(reading: Reading, end_ms: int) -> Iterator[Question]:
    for name, report in reports().items():
        for by in ("gpu", "day") if "by" in report.parameters else ("",):
            for span, span_ms in SPANS.items():
                given = {"name": name, "since": f"{span_ms // HOUR_MS}h", "until": str(end_ms // 1000)}
                asked = OneReport.model_validate({**given, "by": by} if by else given)
                pieces = prepare(reading, report, asked, EVERYTHING, end_ms).pieces
                read = {level: (parts[0][1], parts[-1][2]) for level, parts in pieces.items() if level != "raw"}
                yield (
                    f"{name}{f' by={by}' if by else ''}, {span}",
                    lambda reading, asked=asked: one_report(reading, EVERYTHING, asked, end_ms),  # type: ignore[misc]
                    buckets_in(read) if report.resolution else ROWS[name],
                )


def buckets_in(spans: dict[str, tuple[int, int]]) -> str:
    """Card by card, which is how both databases find a time."""
    counts = [
        f"(SELECT count(*) FROM gpu CROSS JOIN gpu_{level} AS s WHERE s.gpu_id = gpu.gpu_id AND s.bucket_ms >= {from_ms}"
        f" AND s.bucket_ms < {to_ms})"
        for level, (from_ms, to_ms) in spans.items()
    ]
    return f"SELECT {' + '.join(counts)}"


def median_ms(store: Store, answer: Callable[[Reading], Answer], floor: str, rounds: int) -> tuple[float, float]:
    """Of the answer and of the floor, in turns: what else the machine does is shared."""
    whole: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        with store.reading(6 * READ_LIMIT_S) as reading:
            to_json(answer(reading).reply)
        between = time.perf_counter()
        with store.reading(6 * READ_LIMIT_S) as reading:
            reading.tuples(text(floor))
        whole.append((between - began) * 1000)
        bare.append((time.perf_counter() - between) * 1000)
    return statistics.median(whole), statistics.median(bare)


if __name__ == "__main__":
    main()
