# `make demo` and `make test` are all a new checkout needs; both run `make setup` first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# Torch's threads spin while they wait; about 10 us of it costs nothing and leaves the cores to others (LOG.md).
export GOMP_SPINCOUNT ?= 10000

.PHONY: setup demo test test-slow test-sets test-ray check docs parity bench clean

setup: $(STAMP)

# Plain venv and pip with a constraints file, which takes a CPU build of torch where pip is shown one (find-links or an
# extra index); the default index may answer with a CUDA build of the same version, which works too but is large.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/paceline demo

test: setup
	$(BIN)/python -m pytest -n logical --dist worksteal

# Attacks, soak, fuzz, load, long training runs: some 30 minutes. SLOW=tests/train runs a part of them.
SLOW ?= tests
test-slow: setup
	$(BIN)/python -m pytest -m slow $(SLOW)

# The kernels' tests, once for each instruction set that this processor has: some 20 minutes.
test-sets: setup
	for set in $$($(BIN)/python -c "from paceline.kernels.cpu.build import available; print(*available())"); do \
		PACELINE_ISA=$$set $(BIN)/python -m pytest -n logical --dist worksteal tests/kernels || exit 1; \
	done

# Replicas on a Ray cluster of this machine, and servers behind nginx if there is one: some two minutes.
RAY := $(VENV)/.ray

$(RAY): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

test-ray: $(RAY)
	$(BIN)/python -m pytest -m slow --disable-warnings tests/integrations

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site of docs/, into site/. Broken links are errors; what is installed is all that it needs, no network.
DOCS := $(VENV)/.docs

$(DOCS): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

parity: setup
	$(BIN)/python benchmarks/parity.py

# Other programs are measured where they are installed: .venv/bin/pip install -e '.[peers]'. Some 25 minutes in all.
BENCH = $(BIN)/paceline bench --prompts ../shared/data/prompts/spec_bench_dev.jsonl
BENCH += --drafters suffix,eagle3,suffix+eagle3
RESULT = benchmarks/results/$(shell date -u +%F)-bench
files = --out $(1).json --report $(1).md --report $(1).html

bench: setup
	$(BENCH) --count 13 --quantize none,int8+int8 --against transformers,llama.cpp,openvino $(call files,$(RESULT))
	$(BENCH) --count 7 --quantize int8+int8 --temperature 0,0.7 --against transformers $(call files,$(RESULT)-sampled)
	$(BENCH) --count 7 --quantize none,int8+int8 --context 2048 $(call files,$(RESULT)-context)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
