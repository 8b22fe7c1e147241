# Every target makes its own virtual environment first, so `make demo` works in a fresh clone.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# What recording and reading stand on; it also passes on the lowest torch that is allowed.
CORE := $(addprefix tests/, test_private.py layers ledger/test_ledger.py ledger/test_format.py \
	optimizers/test_laws.py owners/test_owners.py $(addprefix recording/, test_record.py \
	test_loops.py test_uses.py test_computed.py test_reconcile.py test_resume.py) \
	$(addprefix read/, test_read.py test_audit.py test_explain.py) \
	$(addprefix laws/, test_balance.py test_identical.py test_attribution.py))

# Tests start many processes: each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-lowest check format frontend browser screenshots bench peers clean

demo: frontend
	$(BIN)/dualform demo

test: check browser
	$(BIN)/python -m pytest -q -n 2 -m "not long"

test-long: frontend browser
	$(BIN)/python -m pytest -q -n 2

# In an environment of its own, .lowest, without the explorer.
test-lowest:
	$(PYTHON) -m venv .lowest
	HATCH_BUILD_NO_HOOKS=1 .lowest/bin/python -m tests.lowest
	.lowest/bin/python -m pytest -q -n 2 -m "not long" $(CORE)

check: frontend
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python hatch_build.py run --silent check
	$(BIN)/python hatch_build.py run --silent test

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python src/dualform/explore/typescript.py --write
	$(BIN)/python hatch_build.py run --silent format

# The explorer's page; does nothing if it is newer than its sources.
frontend: $(STAMP)
	$(BIN)/python hatch_build.py

# The browser of the explorer's tests: one that is found, or else installed.
browser: $(STAMP)
	$(BIN)/python -m tests.explore.browser

screenshots: frontend browser
	$(BIN)/python -m tests.explore.screenshots docs/images

bench: frontend
	$(BIN)/python -m benchmarks

# An environment of its own, in .peers: ours and the libraries it is compared with.
peers:
	$(PYTHON) -m venv .peers
	.peers/bin/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	.peers/bin/python -m pip install --quiet --constraint constraints.txt --editable . \
		--requirement benchmarks/attribution/requirements.txt

$(STAMP): pyproject.toml constraints.txt hatch_build.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	# In a folder of its own, and without torchvision, of which there is no build for the CPU.
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/timm timm==1.0.31
	# Likewise, for quantized caches, which need no more of what hqq asks for.
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/hqq hqq==0.2.8.post1 termcolor==3.3.0
	touch $@

clean:
	rm -rf $(VENV) .peers .lowest dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis frontend/node_modules src/dualform/explore/assets
