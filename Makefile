# `make demo` and `make test` are all that a new checkout needs; each installs what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Torch's threads spin while they wait. About 10 us of spinning costs nothing, and leaves the cores to other programs
# (docs/notes/kernels.md#idle-threads).
export GOMP_SPINCOUNT ?= 10000

# Without bytecode files each process would compile torch and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all check docs parity bench clean

# Plain venv and pip with a constraints file, which takes a CPU build of torch where pip is shown one (find-links or an
# extra index); the default index may answer with a CUDA build of the same version, which works too but is large.
# Modules are compiled to bytecode when they are first imported, as most never are.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# What `paceline` itself needs. The kernels compile while pip works.
READY := $(VENV)/.ready

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (about a minute the first time) ..."
	@PYTHONPATH=src $(BIN)/python -c 'from paceline.kernels.cpu.build import find; find()' 2> $(VENV)/kernels.log & \
		$(PIP) torch==2.13.0 && $(PIP) -e . && { wait; touch $@; }

# What tests and checks need besides.
DEV := $(VENV)/.dev

$(DEV): $(READY)
	@echo "Installing the tools of tests and checks (about a minute the first time) ..."
	@$(PIP) -e '.[dev]'
	@touch $@

setup: $(DEV)

demo: $(READY)
	$(BIN)/paceline demo

test: $(DEV)
	$(BIN)/python -m pytest -n logical --dist worksteal

# Everything: full products, live comparisons with transformers, each instruction set that this processor has, attacks,
# soak, ranks, Ray, browser, other compilers. PART=2/4 runs the second quarter.
ALL := $(VENV)/.all
PART ?= 1/1

$(ALL): $(DEV)
	@$(PIP) -e '.[ray]' ziglang
	@touch $@

test-all: $(ALL)
	$(BIN)/python -m tests.support.everything $(PART)

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site of docs/, into site/. Broken links are errors; what is installed is all that it needs, no network.
DOCS := $(VENV)/.docs

$(DOCS): $(READY)
	@$(PIP) -e '.[docs]'
	@touch $@

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

parity: $(DEV)
	$(BIN)/python benchmarks/parity.py

# Other programs are measured where they are installed: .venv/bin/pip install -e '.[peers]'. Some 25 minutes in all.
BENCH = $(BIN)/paceline bench --prompts ../shared/data/prompts/spec_bench_dev.jsonl
BENCH += --drafters suffix,eagle3,suffix+eagle3
RESULT = benchmarks/results/$(shell date -u +%F)-bench
files = --out $(1).json --report $(1).md --report $(1).html

bench: $(DEV)
	$(BENCH) --count 13 --quantize none,int8+int8 --against transformers,llama.cpp,openvino $(call files,$(RESULT))
	$(BENCH) --count 7 --quantize int8+int8 --temperature 0,0.7 --against transformers $(call files,$(RESULT)-sampled)
	$(BENCH) --count 7 --quantize none,int8+int8 --context 2048 $(call files,$(RESULT)-context)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .test-all.json
