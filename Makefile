# Bare `make` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp

.DEFAULT_GOAL := help
.PHONY: help up test lint fmt schema bench bench-full bench-check chaos chaos-long mutants tools clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: $(STAMP)  ## start everything here; Ctrl-C stops it
	@exec $(BIN)/pgqueue up

test: lint  ## lint, then every test
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## ruff, mypy and the rules for imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fmt: $(STAMP)  ## format the code and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

schema: $(STAMP)  ## write migrations/schema.sql again, after a new migration
	@$(BIN)/python -m pgqueue.migrations.dump

bench: $(STAMP)  ## measure the queue beside the strongest others, for a few minutes
	@$(BIN)/python -m tests.bench.peers

bench-full: $(STAMP)  ## measure everything beside everybody, and write it into tests/bench/README.md
	@$(BIN)/python -m tests.bench.peers --full
	@$(BIN)/python -m tests.bench

bench-check: $(STAMP)  ## fail when the queue became slower by more than a fifth, beside bare SQL
	@$(BIN)/python -m tests.bench.peers.check

chaos: $(STAMP)  ## break everything and count what became of the jobs, for about six minutes
	@$(BIN)/python -m tests.chaos

chaos-long: $(STAMP)  ## the same with 100,000 jobs in the storm, for about an hour
	@$(BIN)/python -m tests.chaos --long

tools:  ## what some tests need beyond Python, from Debian's packages, as root; they are skipped without it
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pgbouncer libfaketime

mutants: $(STAMP)  ## break the queue in ten ways; each time a test must notice
	@$(BIN)/python -m tests.mutants

clean:  ## remove what these targets made; the data in .pgqueue stay
	rm -rf .venv .bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("pgqueue needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@echo "making .venv, once" >&2
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
