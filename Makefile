# `make` alone sets up .venv; `make help` lists the targets with `##`; CONTRIBUTING.md describes the others, too.
# Overridable: PYTHON (the interpreter), VENV (where it goes), ARGS (what a command gets, `make test ARGS="-k order"`),
# GPU_PYTHON (one with a CUDA build of torch, for bench-gpu and sanitize; nothing is set up then).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.stamp
DEMO_STAMP := $(VENV)/.stamp-demo
DOCS_STAMP := $(VENV)/.stamp-docs
SOURCES := pyproject.toml constraints-dev.txt hatch_build.py aiofeed/kernel/decoders/native_jpeg.c aiofeed/kernel/sources/native_files.c
PEERS_VENV ?= .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.stamp
GPU_PYTHON ?= $(BIN)/python
GPU_STAMP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))

.PHONY: venv test test-long first-batch soak kills lint docs demo bench bench-gpu bench-peers sanitize clean help
.DEFAULT_GOAL := venv

venv: $(STAMP)  ## the environment: aiofeed (editable) with all that tests, linters and benchmarks need

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Other packages pull Pillow in, so Pillow-SIMD goes over it as the last step; where it does not build, Pillow serves.
$(STAMP): $(SOURCES) | $(BIN)/python
	$(PIP) install --quiet --constraint constraints-dev.txt --editable '.[pillow,turbo,objects,test,integration,lint,demo,bench]'
	@if $(PIP) install --force-reinstall --no-deps --no-binary pillow-simd pillow-simd > $(VENV)/pillow-simd.log 2>&1; \
	then echo "Images are decoded by Pillow-SIMD."; \
	else echo "Pillow-SIMD did not build (see $(VENV)/pillow-simd.log): images are decoded by Pillow."; fi
	@if [ -e aiofeed/kernel/decoders/_native_jpeg.so ]; then echo "Chunks of JPEGs are decoded by aiofeed's own library."; \
	else echo "aiofeed's own JPEG library was not built: run $(BIN)/python hatch_build.py to see why."; fi
	@if [ -e aiofeed/kernel/sources/_native_files.so ]; then echo "Small files are read by aiofeed's own library."; \
	else echo "aiofeed's own library for files was not built: run $(BIN)/python hatch_build.py to see why."; fi
	@touch $@ $(DEMO_STAMP)

# What the demo needs, which is a sixth of the packages; a complete environment serves, too.
$(DEMO_STAMP): $(SOURCES) | $(BIN)/python
	@echo "Installing torch, aiofeed, Pillow, psutil and rich into $(VENV)."
	$(PIP) install --quiet --constraint constraints-dev.txt --editable '.[pillow,turbo,demo]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP) install --quiet --constraint constraints-dev.txt --editable '.[docs]'
	@touch $@

# Without their bytecode, each program that a test starts compiles all modules again.
test test-long: export PYTHONDONTWRITEBYTECODE :=

# The same examples each time: `make test-long` draws others.
test: export CI ?= true
test: ARGS ?= -m "not slow"
test: $(STAMP)  ## the tests, without the slow ones, on all cores
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

test-long: $(STAMP)  ## all tests
	AIOFEED_EXAMPLES=20000 $(BIN)/python -m pytest --numprocesses auto --dist worksteal --timeout 600 $(ARGS)

first-batch:  # from `pip install` in a fresh environment to the first batch: `make first-batch ARGS=dist/aiofeed.whl`
	$(PYTHON) tests/install/first_batch.py $(ARGS)

soak: $(STAMP)  ## random epochs, left and broken in every way: `make soak ARGS="--seed 7 --minutes 10"`
	$(BIN)/python -m tests.soak $(ARGS)

kills: $(STAMP)  ## processes killed at random moments: `make kills ARGS="--times 200 --seed 7"`
	$(BIN)/python -m tests.soak.kills $(ARGS)

lint: $(STAMP)  ## ruff, mypy --strict, pyright for users, import contracts, unique class names, import cycles
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python .ci/check_types.py
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_tree.py

# Without --clean an API page stays as it was when only a docstring has changed.
docs: $(DOCS_STAMP)  ## the documentation, into site/
	$(BIN)/zensical build --strict --clean
	$(BIN)/python .ci/finish_site.py

demo: $(DEMO_STAMP)  ## a training on photographs through DataLoader and aiofeed, in two minutes with its set-up
	$(BIN)/python examples/demo.py $(ARGS)

bench: $(STAMP)  ## the benchmarks: ratios, and a picture
	$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: $(GPU_STAMP)  # the benchmarks that need a GPU; without one they say so
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# Left out: what takes an hour under it, and what shares a GPU with other processes or with the profiler.
sanitize: TOOL ?= memcheck
sanitize: ARGS ?= -k "not ten_thousand and not compiled and not served and not share and not trace" \
  --deselect tests/kernel/devices/test_copier.py::TestStreams::test_no_wrong_byte
sanitize: $(GPU_STAMP)  # the tests of CUDA under compute-sanitizer, where there is one; `make sanitize TOOL=initcheck`
	@if command -v compute-sanitizer > /dev/null; \
	then compute-sanitizer --tool $(TOOL) --target-processes application-only --report-api-errors no \
	  --error-exitcode 86 $(GPU_PYTHON) -m pytest -m cuda tests/cuda tests/kernel/devices tests/device_groups tests/resident --timeout 300 $(ARGS); \
	else echo "The tests were not run: there is no compute-sanitizer on the path."; fi

# Other loaders bring packages that development wants nothing of, and that put Pillow over Pillow-SIMD.
$(PEERS_STAMP): pyproject.toml benchmarks/peers/requirements.txt benchmarks/peers/install.py
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m benchmarks.peers.install
	@touch $@

bench-peers: $(PEERS_STAMP)  # aiofeed beside other loaders, which go into .venv-peers; half an hour
	$(PEERS_VENV)/bin/python -m benchmarks.peers $(ARGS)

clean:  ## remove the environment and all that was built
	rm -rf $(VENV) $(PEERS_VENV) .cache build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -f aiofeed/kernel/decoders/_native_jpeg.so aiofeed/kernel/sources/_native_files.so LICENSE.libjpeg-turbo.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  # this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-11s %s\n", $$1, $$2 }'
