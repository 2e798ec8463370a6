# make test sets itself up; everything else builds on the same .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTHONS ?= $(wildcard $(HOME)/.pyenv/versions/3.*/bin/python3 /usr/bin/python3)
SORTED = $(shell for python in $(PYTHONS); do \
    $$python -c 'import sys; print(sys.version_info[0] * 100 + sys.version_info[1], sys.executable)'; \
    done | sort -n | cut -d " " -f 2)

.PHONY: test stress pythons self-tests lint self-test model coverage bench check clean

test: $(VENV)/ready
	$(BIN)/pytest -n 4

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --group dev
	touch $@

# What `make test` does in part or small, whole and large, with an hour of storms; it prints what it did. PIDLOCK_SEED=N
# repeats the storms of that seed.
stress: $(VENV)/ready
	PIDLOCK_STRESS=20 $(BIN)/pytest tests --timeout 7200 -s

# The self-test and the black-box tests under each interpreter that this machine has; a warning fails them.
pythons: $(VENV)/ready self-tests
	@set -e; for python in $(PYTHONS); do \
	    echo "== $$python"; PIDLOCK_FLAGS="-W error -X dev" PIDLOCK_PYTHON=$$python $(BIN)/pytest -n 4 -m blackbox; \
	done

self-tests:
	@set -e; for python in $(PYTHONS); do \
	    echo "== $$python"; $$python -W error -X dev pidlock.py --self-test; $$python -O pidlock.py --self-test; \
	done

# The protocol of the lock, checked by SPIN in every state that can be reached.
model: $(VENV)/ready
	PIDLOCK_MODEL=1 $(BIN)/pytest tests/test_model.py -s

# Some tests count descriptors and calls, which coverage adds to: its failures are not the suite's.
coverage: $(VENV)/ready
	$(BIN)/coverage erase
	$(BIN)/coverage run pidlock.py --self-test
	-$(BIN)/coverage run -m pytest -n 4 --ignore tests/test_faults.py
	-$(BIN)/coverage combine -q
	$(BIN)/coverage report -i --include=$(CURDIR)/pidlock.py

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

self-test:
	$(PYTHON) pidlock.py --self-test

bench:  # beside its peers: ROUNDS=10 shortens it, ONLY=library,handoff chooses sections
	/usr/bin/python3 tests/bench/bench.py $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ONLY),--only $(ONLY))

# The black-box tests under the oldest and the newest interpreter; `make pythons` has the others. Ends with the skips.
check: lint self-tests
	@export PIDLOCK_OUTCOMES=$$(mktemp); trap 'rm $$PIDLOCK_OUTCOMES' EXIT; $(MAKE) test model && \
	    $(MAKE) pythons PYTHONS="$(sort $(firstword $(SORTED)) $(lastword $(SORTED)))" && \
	    $(BIN)/python tests/conftest.py

# build, install [PREFIX=/usr/local] [DESTDIR=] [PYTHON=/usr/bin/python3], install-command, uninstall.
include .share/install.mk

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
