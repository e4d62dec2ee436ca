# Two commands matter to a newcomer: `make demo` and `make test`. Both install first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AUDIT := .venv-audit
INTEROP := .venv-interop
# Every file with a test that needs a package of the extra interop, or Trackio.
INTEROP_TESTS := tests/apps/cnn/test_pretrained.py tests/apps/vcd/test_sampler.py \
  tests/bench/test_torch_peer.py tests/data/test_layouts.py tests/data/test_loaders.py \
  tests/data/test_safetensors.py tests/docs/test_code_blocks.py \
  tests/exports/test_torch_file.py tests/run/test_writers.py tests/test_packaging.py
INSTALLED := $(VENV)/.installed
TEST_PYTHON := $(BIN)/python
GPU_PROCESSES := 10

.PHONY: demo test test-slow test-interop test-gpu chaos lint types format docs wheel locked lock sbom audit clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "millrace needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev,docs,images]'
	@touch $@

demo: $(INSTALLED)  ## train a small CNN on the embedded digits
	$(BIN)/millrace cnn train
	@echo "The command millrace is there after: . $(BIN)/activate"

test: $(INSTALLED) lint types  ## everything CI checks
	$(BIN)/python -m pytest -q -rs -n 2 --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -rs -m slow

$(INTEROP)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev,interop]'
	# Not an extra: Trackio excludes the Pillow of constraints.txt.
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check \
	  'trackio==0.43.0' 'pillow<13'
	@touch $@

test-interop: $(INTEROP)/.installed  ## tests with PyTorch, TensorFlow, trackers and others
	$(INTEROP)/bin/python -m pytest -q -n 2 --dist loadfile -m 'not gpu' -rs $(INTEROP_TESTS)

# The whole suite on one GPU, in processes that share it. Without a virtual environment of
# its own: make test-gpu INSTALLED= TEST_PYTHON=python3
test-gpu: $(INSTALLED)
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false $(TEST_PYTHON) -m pytest \
	  -q -n $(GPU_PROCESSES) --dist loadfile -m 'not slow' -rs

chaos: $(INSTALLED)  ## half an hour of faults in all applications; needs root
	PYTHONPATH=tests:benchmarks $(BIN)/python -m chaos.campaign --report

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/basedpyright

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## build the documentation: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "written to site/index.html; to search in it: $(BIN)/python -m http.server -d site"

wheel: $(INSTALLED)
	$(BIN)/python -m build --wheel

# The exact files of requirements.lock, verified by their hashes, as CI installs them.
locked: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes --only-binary :all: --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation --editable .
	@touch $(INSTALLED)

$(AUDIT)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt 'cyclonedx-bom>=7' 'pip-audit>=2.9' uv
	@touch $@

lock: $(AUDIT)/.installed  ## write requirements.lock after a change of pyproject.toml or constraints.txt
	$(AUDIT)/bin/uv pip compile pyproject.toml --quiet --extra dev --extra docs --extra images \
	  --constraint constraints.txt --python-platform x86_64-manylinux_2_28 \
	  --python-version 3.11.9 --generate-hashes --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links --output-file requirements.lock

sbom: $(AUDIT)/.installed  ## list what an installation contains: dist/sbom.cdx.json
	$(PYTHON) -m venv --clear $(AUDIT)/runtime
	$(AUDIT)/runtime/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt .
	mkdir -p dist
	$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-format JSON --output-file dist/sbom.cdx.json $(AUDIT)/runtime/bin/python
	@echo "written to dist/sbom.cdx.json"

audit: $(AUDIT)/.installed  ## look up known vulnerabilities of requirements.lock; needs a network
	$(AUDIT)/bin/pip-audit --strict --require-hashes --disable-pip \
	  --requirement requirements.lock

clean:
	rm -rf $(VENV) $(AUDIT) $(INTEROP) dist site
