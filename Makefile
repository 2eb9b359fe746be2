# Every target works on a fresh clone: it makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEVICE ?= cpu
# Each worker takes a half of the tests and, when it is done, of what the other has left. What Python compiles is kept,
# whatever the environment says: the workers load some 600 files, and the tests start dozens of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo test test-all test-gpu test-minimum test-wheel lint docs bench clean

demo: $(VENV)/core
	$(BIN)/sigmasolver demo

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

# What is skipped without a GPU, and the kernels, which elsewhere run in Triton's interpreter.
test-gpu: $(VENV)/dev
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu needs a GPU and a torch that sees it: make test-gpu VENV=...")'
	$(BIN)/pytest -m gpu
	$(BIN)/pytest -m "not gpu and not slow" tests/ops

# A representative subset of the tests with the lowest versions that pyproject.toml allows, in a separate environment.
# TORCH=2.13.0 uses another torch, for instance where the lowest has no build for the machine.
LOWEST := .venv-minimum
TORCH ?=
PROJECT := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]
EXTRAS := ("data", "tracking")
test-minimum:
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) -c '$(PROJECT); extras = [requirement for name in $(EXTRAS) for requirement in project["optional-dependencies"][name]]; lowest = [requirement.replace(">=", "==") for requirement in project["dependencies"] + extras]; print(*("torch==$(TORCH)" if "$(TORCH)" and requirement.startswith("torch==") else requirement for requirement in lowest), sep="\n")' > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/pip install --quiet -r $(LOWEST)/lowest.txt pytest hypothesis
	$(LOWEST)/bin/pip install --quiet --no-deps -e .
	$(LOWEST)/bin/pytest -m "not slow" tests/test_api.py tests/cli/test_cli.py tests/cli/test_help.py tests/forecast/test_forecaster.py tests/model_cards/test_pretrained.py tests/test_tracking.py tests/test_xarray.py tests/data/test_store.py tests/ops/test_swiglu.py tests/report/test_page.py

# The wheel in an empty environment outside the checkout, where the scripts of docs/journeys run with it. KEEP=1 keeps
# what they print as their text in the documentation.
OUTSIDE := $(or $(TMPDIR),/tmp)/sigmasolver-wheel
JOURNEYS := engineer researcher student reviewer
test-wheel: $(VENV)/dev
	rm -rf $(OUTSIDE)
	$(BIN)/python -m hatchling build --target wheel --directory $(OUTSIDE)
	$(PYTHON) -m venv $(OUTSIDE)/env
	$(OUTSIDE)/env/bin/pip install --quiet -c constraints.txt "$$(ls $(OUTSIDE)/*.whl)[data,export]"
	@set -e; for name in $(JOURNEYS); do \
		mkdir $(OUTSIDE)/$$name && cp docs/journeys/$$name.sh $(OUTSIDE); \
		(cd $(OUTSIDE)/$$name && env -u PYTHONPATH COLUMNS=100 PATH=$(OUTSIDE)/env/bin:$$PATH bash ../$$name.sh) \
			> $(OUTSIDE)/$$name.txt 2>&1 || { cat $(OUTSIDE)/$$name.txt; exit 1; }; \
		tail -n 1 $(OUTSIDE)/$$name.txt; \
	done
	$(if $(KEEP),cp $(JOURNEYS:%=$(OUTSIDE)/%.txt) docs/journeys)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# Every file that is made from others: the page of results, the cards of the pretrained models, and the site.
docs: $(VENV)/dev
	$(BIN)/sigmasolver ledger
	$(BIN)/python -m sigmasolver.model_cards
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean
	@echo site/index.html

# Prints; the same commands with `--out results/NAME.jsonl` keep the rows. DEVICE=cuda measures on a GPU.
bench: $(VENV)/core
	$(BIN)/python benchmarks/spectral.py --device $(DEVICE)
	$(BIN)/python benchmarks/simulate.py --device $(DEVICE)
	$(BIN)/python benchmarks/rollout.py --device $(DEVICE)

$(VENV)/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sigmasolver needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/dev: $(VENV)/core
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
