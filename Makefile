# Everything runs in a virtual environment in the tree, made on first use. PYTHON may name another Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests wait much: one process more than there are cores, a file of tests each at a time.
TESTERS := $(shell expr $$(nproc) + 1)
PROTOS := $(wildcard proto/gpuwire/pb/*.proto)

.PHONY: help demo test soak check golden screenshots proto migration wheel pins

help:
	@echo "make demo       three CVMs, a proxy and an aggregator on this machine; Ctrl-C ends them (DEMO_ARGS=--help says more)"
	@echo "make test       all tests (PYTEST_ARGS=... passes arguments on)"
	@echo "make soak       the long proofs: outages, locks, kills, hostile requests (ten minutes)"
	@echo "make check      formatter, linter, type checker"
	@echo "make golden     rewrite generated docs and golden files; the diff is the review"
	@echo "make screenshots  retake the docs' pictures (needs chromium)"
	@echo "make proto      regenerate the stubs from proto/"
	@echo "make migration  draft a migration from the tables (NAME=what_it_does)"
	@echo "make wheel      build what is committed into dist/, the same bytes each time"
	@echo "make pins       move the agent's pinned requirements and SBOM to the newest versions; the diff is the review"

# What the agent's image is pinned to is what is tested.
$(READY): pyproject.toml deploy/requirements/agent.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	@echo "setting up $(VENV) (a minute or two on a fresh machine)"
	@$(PYTHON) -m venv $(VENV)
	@sed -n 's/^\([a-z0-9-]*==[^ ]*\).*/\1/p' deploy/requirements/agent.txt > $(VENV)/agent.txt
	@PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/agent.txt -e '.[all,test]'
	@touch $@

demo: $(READY)
	@$(BIN)/python -m demo $(DEMO_ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(TESTERS) --dist loadfile $(PYTEST_ARGS)

soak: $(READY)
	$(BIN)/python -m pytest -s -m soak tests/soak $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

golden: $(READY)
	$(BIN)/python -m tests.golden

screenshots: $(READY)
	$(BIN)/python -m tests.screenshots

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. $(PROTOS)
	@echo "fingerprint: $$($(BIN)/python -m gpuwire.fingerprint)"

migration: $(READY)
	@test -n "$(NAME)" || { echo "usage: make migration NAME=what_it_does"; exit 2; }
	@mkdir -p build && rm -f build/migration.db
	$(BIN)/alembic upgrade head
	$(BIN)/alembic revision --autogenerate -m "$(NAME)" --rev-id "$$(printf %04d $$(ls migrations/versions/[0-9]*.py | wc -l | xargs expr 1 +))"

# From a clone of its own: nothing that lies about here gets in. Times and modes are part of the bytes.
wheel: $(READY)
	@rm -rf build/wheel && mkdir -p build/wheel
	umask 022 && git -c tar.umask=022 archive HEAD | tar -x -C build/wheel
	umask 022 && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/pip wheel --quiet --disable-pip-version-check \
		--no-index --no-deps --no-build-isolation --wheel-dir dist build/wheel
	@sha256sum dist/*.whl

pins: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[all,test]'
	$(BIN)/python -m tests.deploy.pins
