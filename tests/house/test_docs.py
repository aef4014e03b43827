"""Docs cannot rot: what they name exists, and what is made from the code is as the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden import GOLDEN, PROGRAMS, ROOT, commands

DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "proto/README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", GOLDEN, ids=name)
def test_what_is_made_from_the_code_is_up_to_date(path: Path) -> None:
    assert path.read_text() == GOLDEN[path](), "run `make golden` and look at the diff"


@pytest.mark.parametrize("doc", DOCS, ids=name)
def test_links_lead_somewhere(doc: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", doc.read_text())
    missing = [link for link in links if not link.startswith("https://") and not (doc.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("doc", DOCS, ids=name)
def test_files_that_are_named_exist(doc: Path) -> None:
    named = re.findall(r"`?\b((?:proto|gpuwire|guest_agent|host_proxy|aggregator|tests|docs)/[\w/.-]+\w)", doc.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("doc", DOCS, ids=name)
def test_make_targets_that_are_named_exist(doc: Path) -> None:
    targets = re.findall(r"(?:^|`)make ([a-z]+)", doc.read_text(), re.MULTILINE)
    assert [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []


@pytest.mark.parametrize("doc", DOCS, ids=name)
def test_commands_that_are_named_take_the_flags_that_they_are_given(doc: Path) -> None:
    for program, rest in re.findall(r"^\s*(gpu-[a-z-]+) (.*)", doc.read_text(), re.MULTILINE):
        words = rest.partition("#")[0]
        found = [command for name, command in commands(PROGRAMS[program]) if words.startswith(name)]
        assert found, f"{program} has no command {words}"
        known = {flag for parameter in found[0].params for flag in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", words)) <= known
