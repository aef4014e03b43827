"""Docs cannot rot: what they name exists, and what is made from the code is as the code says. SQL is in test_docs_sql.py."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from aggregator.comments import column_comment
from tests.golden import GOLDEN, ROOT
from tests.house.doc_checks import CHECKS, Document
from tests.needs import program_or_skip
from tests.reference import OUTCOMES

DOCS = [*ROOT.glob("*.md"), ROOT / "proto/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", GOLDEN, ids=name)
def test_what_is_made_from_the_code_is_up_to_date(path: Path) -> None:
    assert path.read_text() == GOLDEN[path](), "run `make golden` and look at the diff"


def test_the_reference_has_each_outcome_that_the_view_tells_of() -> None:
    told = column_comment("v_cvm_state", "outcome") or ""
    assert set(told.removesuffix(".").replace(" or ", ", ").split(", ")) == OUTCOMES.keys()


@pytest.mark.parametrize("doc", DOCS, ids=name)
@pytest.mark.parametrize("check", CHECKS)
def test_what_a_document_names_is_there(check: str, doc: Path) -> None:
    assert list(CHECKS[check](Document(doc, doc.read_text()))) == []


def test_scrape_configurations_are_sound(tmp_path: Path) -> None:
    documents = [Document(doc, doc.read_text()) for doc in DOCS]
    blocks = [block for doc in documents for language, block in doc.blocks if language == "yaml" and "scrape_configs:" in block]
    assert blocks
    shutil.copy(ROOT / "deploy/prometheus/gpu-fleet.rules.yml", tmp_path)
    for block in blocks:
        (tmp_path / "prometheus.yml").write_text(block)
        command = [program_or_skip("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}{done.stdout}{done.stderr}"


# For each check what is wrong, and what is found.
WRONG = {
    "links": [
        ("[x](docs/none.md)", "docs/none.md: no such file"),
        ("[x](docs/api.md#none)", "docs/api.md#none: no such heading"),
        ("# A head\n[x](#a-heading)", "#a-heading: no such heading"),
        ('<img src="docs/images/none.png">', "docs/images/none.png: no such file"),
    ],
    "files": [
        ("see `aggregator/none.py`", "aggregator/none.py: no such file"),
        ("cp deploy/systemd/none.* /etc", "deploy/systemd/none.*: no such file"),
    ],
    "units": [("`gpu-none.service`", "gpu-none.service: not in deploy/")],
    "extras": [("pip install '.[agent,none]'", "[none]: no such extra")],
    "make_targets": [
        ("`make none`", "make none: no such target"),
        ("```sh\nmake test NONE=1\n```", "make NONE=1: no such variable"),
        ("`make demo DEMO_ARGS='--none'`", "make demo: no flag --none"),
    ],
    "programs": [
        ("`gpu-aggregator none`", "gpu-aggregator none: no such command"),
        ("```sh\nA=1 gpu-aggregator db check \\\n  --none x | cat\n```", "gpu-aggregator db check: no flag --none"),
        ("`gpu-host-proxy serve --listen nowhere`", "gpu-host-proxy serve: Invalid value for '--listen': 'nowhere' is not"),
        ("`gpu-aggregator serve --unversioned maybe`", "gpu-aggregator serve: Invalid value for '--unversioned': 'maybe'"),
        ("`gpu-aggregator report none`", "gpu-aggregator report none: no such report"),
        ("`gpu-guest-agent gpu-info now`", "gpu-guest-agent gpu-info: takes no now"),
    ],
    "flags": [("with `--none 3`", "--none: no such flag")],
    "modules": [
        ("`python -m bench.none`", "python -m bench.none: no such module"),
        ("```text\npython -m bench.fleet --none\n```", "python -m bench.fleet: no flag --none"),
        ("`python -m demo --none`", "python -m demo: no flag --none"),
    ],
    "environment": [("`AGGREGATOR_NONE`", "AGGREGATOR_NONE: no such setting")],
    "toml": [
        ("```toml\nnone = 1\n```", "none: no such keys of one program"),
        ('```toml\n[[vm]]\nid = "a"\nguest = "vsock:3:8000"\nnone = 1\n```', "vms file: [[vm]] number 1: unknown key 'none'"),
    ],
    "series": [
        ("`dstack_gpu_none`", "dstack_gpu_none: no such series"),
        ("`gpu_aggregator_none_*`", "gpu_aggregator_none_*: no such series"),
        ("`gpu_aggregator_vmm_up{none}`", "gpu_aggregator_vmm_up: has no label none"),
        ('`gpu_aggregator_vmm_up{vmm="a", none=~"b"}`', "gpu_aggregator_vmm_up: has no label none"),
        ("`vmm:dstack_gpu_none:avg`", "vmm:dstack_gpu_none:avg: no rule records it"),
    ],
    "alerts": [("`GpuNone`", "GpuNone: no such alert")],
    "paths": [
        ("`/api/v1/none`", "/api/v1/none: no such route"),
        ("`/guest/None`", "/guest/None: no such route"),
        ("`/readyx`", "/readyx: no such route"),
        ("`POST /guests/None`", "/guests/None: no such route"),
        ("curl 'http://127.0.0.1:8080/api/v1/gpus?none=1'", "/api/v1/gpus?none=1: malformed"),
        ("curl 'http://127.0.0.1:8080/api/v1/gpus'  # 400", "/api/v1/gpus: is taken, but the document says"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_finds_what_is_wrong(check: str) -> None:
    for text, expected in WRONG[check]:
        found = list(CHECKS[check](Document(ROOT / "wrong.md", f"{text}\n")))
        assert [line[: len(expected)] for line in found] == [expected], text
