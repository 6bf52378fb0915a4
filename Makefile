# Everything works on a machine with nothing but Python >= 3.11 and pip:
#   make demo     trains the digits example over 3 local CPU ranks and prints its accuracy
#   make test     format, lint, import rules, types, all tests
#   make verify   the long versions of everything; writes verify-report.json

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
LOOPS  := $(VENV)/.loops

# Core, wire and config are covered wholly by their own tests; see "coverage" below.
OWN_TESTS := $(wildcard tests/unit/core tests/unit/wire tests/unit/config tests/property tests/sim)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test verify format check coverage tests clean

help:
	@sed -n '2,4s/^# *//p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "flodl needs Python 3.11 or newer; %s is %s. Name another one: make PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "installing flodl and its test tools into $(VENV) (minutes the first time)"
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch==2.13.0 -e '.[test,examples]'
	@touch $@

# Other people's training loops, which only tests need.
$(LOOPS): $(READY)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[frameworks]'
	@touch $@

demo: $(READY)
	$(BIN)/fdl launch --local 3 examples/digits.py

test: check coverage tests

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# Own tests only: a line of the core that only a test of another room reaches counts as uncovered.
coverage: $(READY)
	@mkdir -p build/coverage
	COVERAGE_FILE=build/coverage/own $(BIN)/python -m pytest -q -n 2 $(OWN_TESTS) --cov --cov-report=term-missing

# The other unit tests first, two at a time. Then, alone on the machine and one after another, those that start processes
# and measure time; their summary ends the output.
tests: $(READY)
	$(BIN)/python -m pytest -q -n 2 tests/unit $(addprefix --ignore=,$(OWN_TESTS))
	$(BIN)/python -m pytest tests/integration tests/system

verify: $(LOOPS)
	$(BIN)/python benchmarks/verify.py

clean:
	rm -rf build dist mutants *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
