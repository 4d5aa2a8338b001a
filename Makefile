# Every target sets up what it needs: a virtual environment with the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-smoke test-slow test-machines test-gpu mutants lint format bench coverage api figures clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt pip hatchling editables
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[reproduce,train,dev]'
	touch $@

demo: setup
	OMP_NUM_THREADS=1 $(BIN)/qclip train --out out/demo --overwrite

# One thread for each process of the tests: numba's loops would otherwise give torch as many as there are cores, and
# threads that wait for each other spin.
test test-smoke test-slow test-machines: export OMP_NUM_THREADS = 1
test test-smoke test-slow test-machines: export NUMBA_NUM_THREADS = 1

test: setup
	$(BIN)/pytest -n auto -o verbosity_subtests=0

test-smoke: setup
	$(BIN)/pytest -m smoke tests

test-slow: setup
	$(BIN)/pytest -n auto -o verbosity_subtests=0 -m 'slow or hypothesis' --thorough

# The numeric suites as other CPUs would round, and with other seeds.
test-machines: setup
	$(BIN)/python tests/machines.py

# The machine's own Python: where there is a GPU nothing may be installable. See CONTRIBUTING.md.
test-gpu:
	@$(PYTHON) -c 'import pytest, torch' || { echo 'make test-gpu: $(PYTHON) needs pytest and torch, and nothing is' \
	  'installed here: carry them in a folder, PYTHONPATH=folder (CONTRIBUTING.md, "Tests on a GPU")' >&2; exit 1; }
	PYTHONPATH="src:$$PYTHONPATH" $(PYTHON) -u -m pytest tests/gpu -m gpu --confcutdir=tests/gpu -p no:cacheprovider \
	  -v -rs --durations=25 --show-capture=no $(ARGS)

# Faults planted one at a time, and what catches them; ARGS='--only "hole 3"' runs some, whose rows are replaced.
mutants: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m mutants.run --page docs/guarantees.md $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	$(BIN)/python docs/wrap.py --check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/wrap.py

bench: setup
	$(BIN)/pip install --quiet -c constraints.txt opacus
	$(BIN)/qclip bench --device cpu
	$(BIN)/python benchmarks/simulate.py

# docs/coverage.md: every class of models of transformers; hours, but it goes on where it stopped.
coverage: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/model_coverage.py --page docs/coverage.md $(ARGS)

# docs/api.md, from the public names and their docstrings.
api: setup
	$(BIN)/python docs/make_api.py

# DATA_DIR: the folder of the data sets of Figure 1, without which its page keeps the figure that it has.
figures: setup
	$(BIN)/qclip reproduce --out out/full $(if $(DATA_DIR),--data-dir $(DATA_DIR))
	$(if $(DATA_DIR),,rm -f out/full/figures/figure1.png)
	for name in $$(grep -oh 'figures/[a-z0-9.-]*png' README.md docs/*.md | sort -u); do \
	  if [ -f out/full/$$name ]; then cp out/full/$$name docs/$$name; fi; done

clean:
	rm -rf $(VENV) out build dist
