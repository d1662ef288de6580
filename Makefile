# Everything needed is set up in .venv; nothing but Python 3.11, Java 17 and make is expected.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready

# How many tests run beside each other: one by itself leaves a third of two cores idle, waiting for a JVM or a disk.
TESTS ?= 2
SEED ?= 1
ROUNDS ?= 10

.PHONY: demo test test-all chaos bench-engine bench-recovery bench-rescale lint types imports check clean java

demo: $(READY) java
	$(RUN)/python examples/demo.py

test: $(READY) java
	$(RUN)/python -m pytest -m "not slow" --numprocesses $(TESTS) --dist worksteal

test-all: $(READY) java
	$(RUN)/python -m pytest

# Random flows under random faults: make chaos SEED=7 ROUNDS=25 ARGS=--verbose
chaos: $(READY) java
	$(RUN)/python -m chaos --seed $(SEED) --rounds $(ROUNDS) $(ARGS)

bench-engine: $(READY) java
	$(RUN)/python -m bench.engine $(ARGS)

bench-recovery: $(READY) java
	$(RUN)/python -m bench.recovery $(ARGS)

bench-rescale: $(READY) java
	$(RUN)/python -m bench.rescale $(ARGS)

lint: $(READY)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: $(READY)
	$(RUN)/mypy

imports: $(READY)
	$(RUN)/lint-imports

check: lint types imports

# constraints.txt pins every package, direct or not, to what was tested.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.11, or say make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

java:
	@scripts/java

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
