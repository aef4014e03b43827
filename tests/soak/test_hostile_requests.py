"""Ten thousand requests that nobody means well with, on each database: each is answered in time and within its token's scope,
none by a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aggregator.test_openapi import ask_by_the_document, ask_with_malice, program

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_ten_thousand_hostile_requests(kind: str, short_dir: Path, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{short_dir}/history.db" if kind == "sqlite" else str(request.getfixturevalue("postgres_url"))
    with program(url, short_dir) as address:
        by_document = ask_by_the_document(address, examples=150)
        answered = ask_with_malice(address, 10_000, 1)
    print(f"\n{kind}: {by_document} by the document, hostile {dict(sorted(answered.items()))}")
    assert by_document > 1500
    assert answered[200] > 1000
