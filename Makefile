# The commands of this project. Each makes .venv from constraints.txt first, if it is missing or older than what it
# is made of; the first time takes a few minutes, nearly all of it torch.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -c constraints.txt

.PHONY: help demo test test-quick soak check bench docs clean

help:
	@echo "make demo        train on real handwritten digits, and see what a run leaves behind"
	@echo "make test        every test"
	@echo "make test-quick  the tests that are not marked slow"
	@echo "make soak        the tests of faults in their long form: KILLS (1000), FLIPS (100000), HOSTILE (10000), LOSSES (200)"
	@echo "make check       format, lint, types, architecture"
	@echo "make bench       what the loop, its checkpoints and its samples cost, beside hand-written ones"
	@echo "make docs        write the generated pages again"
	@echo "make clean       remove .venv and caches"

.venv/.stamp: constraints.txt pyproject.toml
	@echo "making .venv (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools torch numpy
	$(PIP) --no-build-isolation -e ".[dev]"
	@touch $@

# One thread a process: the tests start several at once, and sums come out the same everywhere.
test test-quick soak check bench: export OMP_NUM_THREADS = 1

demo: .venv/.stamp
	$(BIN)/python examples/digits.py

test: .venv/.stamp
	$(BIN)/python -m pytest

test-quick: .venv/.stamp
	$(BIN)/python -m pytest -m "not slow"

KILLS ?= 1000
FLIPS ?= 100000
HOSTILE ?= 10000
LOSSES ?= 200
soak: .venv/.stamp
	KILLS=$(KILLS) $(BIN)/python -m pytest tests/faults/test_kills.py tests/faults/test_resume_auto.py -k soak
	FLIPS=$(FLIPS) $(BIN)/python -m pytest tests/faults/test_damage_anywhere.py
	CYCLES=0 $(BIN)/python -m pytest tests/faults/test_save_cycle.py
	LOSSES=$(LOSSES) $(BIN)/python -m pytest tests/faults/test_power_loss.py
	HOSTILE=$(HOSTILE) $(BIN)/python -m pytest tests/faults/test_hostile_checkpoints.py

check: .venv/.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict trainer_kit
	$(BIN)/python -m pytest tests/test_architecture.py

bench: .venv/.stamp
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/samples.py

docs: .venv/.stamp
	$(BIN)/python docs/generate_hooks.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
