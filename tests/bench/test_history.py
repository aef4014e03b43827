"""The history that is made says the truth about itself, and a database filled with it agrees."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest

from aggregator.bulk import SAMPLE_COLUMNS
from bench.history import HOUR_MS, STALE_MS, History, Shape, Share
from tests.aggregator.conftest import database_url
from tests.bench.test_benches import ROOT
from tests.postgres import postgres_url

__all__ = ["database_url", "postgres_url"]

SHAPE = Shape(days=20, cards=5, interval_ms=60_000)
MIDDLE = (SHAPE.start_ms + 100 * HOUR_MS, SHAPE.start_ms + 301 * HOUR_MS + 17_000)


@pytest.mark.parametrize(("from_ms", "to_ms"), [(0, 2**62), MIDDLE])
def test_the_truth_is_what_the_samples_say(from_ms: int, to_ms: int) -> None:
    history = History(SHAPE)
    found: defaultdict[str, Share] = defaultdict(Share)
    for card in history.cards:
        last: dict[object, int] = {}
        for row in history.samples(card):
            sample = dict(zip(SAMPLE_COLUMNS, row, strict=True))
            at_ms, stay = sample["sampled_at_ms"], sample["tenancy_id"]
            assert at_ms is not None and sample["power_usage_mw"] is not None
            spoken_ms = min(at_ms - last.get(stay, at_ms), STALE_MS)
            last[stay] = at_ms
            if not from_ms <= at_ms < to_ms:
                continue
            share = found[card.uuid]
            share.samples += 1
            share.energy_uj += spoken_ms * sample["power_usage_mw"]
            if sample["utilization_gpu"]:
                share.busy_ms += spoken_ms
            else:
                share.idle_ms += spoken_ms
    truth = history.truth(from_ms, to_ms)
    for uuid, share in found.items():
        share.attached_ms = truth.by_card[uuid].attached_ms
    assert truth.by_card == found
    for figure in ("attached_ms", "busy_ms", "idle_ms", "energy_uj", "samples"):
        by_app = sum(getattr(share, figure) for share in truth.by_app.values())
        assert by_app == sum(getattr(share, figure) for share in truth.by_card.values())
    assert truth.moves.total() > 0
    assert min(share.busy_ms for share in found.values()) > 0
    assert min(share.unknown_ms for share in truth.by_card.values()) > 0


def test_the_same_shape_is_the_same_history_and_another_seed_another_one() -> None:
    rows = [list(history.samples(history.cards[2])) for history in (History(SHAPE), History(SHAPE))]
    other = History(Shape(days=20, cards=5, interval_ms=60_000, seed=2))
    assert rows[0] == rows[1] != list(other.samples(other.cards[2]))


def test_a_database_that_is_filled_with_it_agrees_in_all_resolutions(database_url: str) -> None:
    end = "2026-11-30T00:00:00Z"
    command = [
        sys.executable,
        "-m",
        "bench.make_history",
        "--db",
        database_url,
        "--days",
        "3",
        "--cards",
        "9",
        "--interval",
        "60",
    ]
    first, second = (
        subprocess.run([*command, "--end", end], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        for _ in range(2)
    )
    assert "raw, 5m, 1h and the truth agree" in first.stdout, first.stdout + first.stderr
    assert first.returncode == 0
    assert "holds cards already: give an empty database" in second.stderr
