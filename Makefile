# `make` lists the targets. Everything below works on a bare Debian machine with Python 3.11+.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
# Without torch: proves that the gateway and the scheduling code need none.
LIGHT_VENV := .venv-gateway
LIGHT := $(LIGHT_VENV)/.installed
# The pip that a Python brings takes up to three times as long to resolve.
PIP := pip==26.3
PIP_INSTALL = -m pip install --disable-pip-version-check -c constraints.txt
PINS := pyproject.toml constraints.txt
# All but torch, whose builds differ by index, is installed by its hash.
DEV_LOCK := requirements-dev.lock
WORKERS ?= 2
# Each module is compiled once, not by each of hundreds of processes (torch: 1.5 s of 3).
unexport PYTHONDONTWRITEBYTECODE
ALONGSIDE = $(MAKE) --no-print-directory --jobs=$(WORKERS) --output-sync=target
say = @printf '\n==> %s\n' '$(1)'

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- set-up: each step is done once, and again when the pins change ---------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("$(PYTHON) is too old: make PYTHON=python3.11, or later")'
	@PYTHON=$(PYTHON) scripts/ensure-system.sh venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --quiet $(PIP)

$(RUNTIME): $(PINS) | $(BIN)/python
	$(call say,installing the services into $(VENV))
	$(BIN)/python $(PIP_INSTALL) -e '.[gateway,encoder,decoder,cli]'
	@touch $@

# Most of the modules are never imported, so each is compiled when it first is.
$(DEV): $(PINS) $(DEV_LOCK) | $(BIN)/python
	$(call say,installing services and development tools into $(VENV))
	$(BIN)/python $(PIP_INSTALL) --no-compile --no-deps --require-hashes -r $(DEV_LOCK)
	$(BIN)/python $(PIP_INSTALL) --no-compile torch
	$(BIN)/python $(PIP_INSTALL) --no-compile --no-deps -e .
	@touch $(RUNTIME) $@

$(LIGHT): $(DEV)
	$(call say,linking what the gateway needs into $(LIGHT_VENV))
	$(PYTHON) -m venv --clear --without-pip $(LIGHT_VENV)
	@echo '*' > $(LIGHT_VENV)/.gitignore
	$(BIN)/python scripts/light_environment.py $(LIGHT_VENV)
	@touch $@

.PHONY: setup
setup: $(DEV) ## make .venv with everything that development needs

.PHONY: system-runtime
system-runtime:
	@REDIS_OPTIONAL=yes scripts/ensure-system.sh redis

.PHONY: system-test
system-test: | $(BIN)/python
	@scripts/ensure-system.sh redis chromium
	@$(BIN)/python scripts/ensure_helm.py

# --- running ----------------------------------------------------------------------------------

.PHONY: demo
demo: system-runtime $(RUNTIME) ## start the stack, ask the demonstration model about images and clips, stop
	@$(BIN)/triptych demo

.PHONY: serve
serve: system-runtime $(RUNTIME) ## serve a model until Ctrl-C: make serve ARGS="ORG/NAME"
	@$(BIN)/triptych serve $(ARGS)

.PHONY: bench
bench: $(DEV) ## measure a running server: make bench ARGS="--url URL --rows text_c1"
	@$(BIN)/python -m benchmarks.serve $(ARGS)

# --- checking ---------------------------------------------------------------------------------

.PHONY: test
# Programs are installed beside packages; what needs no stack begins when the packages are there.
test: | $(BIN)/python ## everything that must hold
	@$(ALONGSIDE) system-test test-light collect type lint proto-check site
	@$(MAKE) --no-print-directory e2e
	@$(MAKE) --no-print-directory unit ARGS="$$($(BIN)/python scripts/check_without_torch.py --ran)"

.PHONY: lint
lint: $(DEV) ## style, formatting, dependency rules, sizes, prose
	$(call say,ruff; import-linter; sizes; prose)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_sizes.py
	@$(BIN)/python scripts/check_prose.py

.PHONY: type
type: $(DEV) ## static types
	$(call say,pyright)
	@$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: unit
# One process more than there are cores: tests wait for a third of their time (ADR 0010).
unit: $(DEV) ## all tests that start no stack
	$(call say,pytest)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(($(WORKERS) + 1)) --dist worksteal \
		--ignore=tests/e2e --ignore=tests/cluster --ignore=tests/gpu \
		-m "not gpu and not e2e and not nightly" $(ARGS)

.PHONY: collect
# Modules are compiled and assertions rewritten here, instead of in each process of the tests.
collect: $(DEV) ## import all tests that `make test` runs
	$(call say,collecting the tests)
	@mkdir -p build
	@$(BIN)/python -m pytest -p no:cacheprovider --collect-only -q --ignore=tests/cluster \
		--ignore=tests/gpu > build/collected.txt || { tail -40 build/collected.txt; exit 1; }
	@tail -1 build/collected.txt

.PHONY: e2e
# These, too: tests/e2e/conftest.py says which files share a process.
e2e: $(DEV) ## tests that start real processes
	$(call say,pytest: whole stacks)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/e2e -n $$(($(WORKERS) + 1)) --dist loadfile \
		--no-loadscope-reorder -m "e2e and not gpu and not nightly" $(ARGS)

.PHONY: nightly
# In turn: these measure latencies and memory beside attacks, floods and failures.
nightly: system-test $(DEV) ## trials of minutes that `make test` has one of each of, and all cases
	$(call say,pytest: nightly trials)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "nightly and not gpu" $(ARGS)
	$(call say,pytest: tests of which `make test` has some cases)
	@TESTS=thorough OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "thorough and not e2e and not gpu" \
		-n $$(($(WORKERS) + 1)) --dist worksteal $(ARGS)

.PHONY: quick
quick: $(DEV) ## what a change is checked with in less than a minute
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/quick.py

.PHONY: test-light
test-light: $(LIGHT) ## gateway and scheduling in an environment without torch
	$(call say,gateway and scheduling without torch)
	@$(LIGHT_VENV)/bin/python scripts/check_without_torch.py

.PHONY: clients
clients: system-runtime $(DEV) ## clients that others wrote: docs/clients.md
	@$(BIN)/python tests/clients/run.py $(ARGS)

.PHONY: peers
peers: $(DEV) ## server tests of vLLM, SGLang and llama.cpp: docs/clients.md
	@$(BIN)/python tests/peers/run.py $(ARGS)

.PHONY: test-gpu
test-gpu: $(DEV) ## tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

.PHONY: proto
proto: $(DEV) ## generate services/common/pb from proto/
	@scripts/generate_proto.sh $(BIN)/python .

.PHONY: proto-check
proto-check: $(DEV) ## the generated code is that of proto/
	$(call say,protos)
	@scripts/check_proto.sh $(BIN)/python

SITE := build/site-tool/.installed
$(SITE): Makefile
	$(call say,installing what builds the site)
	@$(PYTHON) -m venv build/site-tool
	@build/site-tool/bin/python -m pip install --quiet --disable-pip-version-check mkdocs-material==9.8.2
	@touch $@

.PHONY: site
site: $(SITE) ## build the documentation into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 build/site-tool/bin/mkdocs build --strict

.PHONY: pictures
pictures: system-test $(DEV) ## take the pictures of the chat page in docs/chat-page
	@$(BIN)/python scripts/page_pictures.py

.PHONY: math-font
math-font: ## make the font of formulas on the chat page from the Debian package fonts-lmodern
	@$(PYTHON) -m venv build/font-tool
	@build/font-tool/bin/python -m pip install --quiet --disable-pip-version-check \
		fonttools==4.68.0 brotli==1.2.1
	@build/font-tool/bin/python scripts/math_font.py

# --- the rest ---------------------------------------------------------------------------------

.PHONY: format
format: $(DEV) ## format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: constraints
constraints: $(DEV) ## write the versions of .venv into constraints.txt and constraints-gpu.txt
	@$(BIN)/python scripts/closure.py > constraints.new
	@$(BIN)/python scripts/closure.py --gpu > constraints-gpu.txt
	@mv constraints.new constraints.txt

.PHONY: locks
locks: $(DEV) ## write what images and `make setup` install, with hashes, into *.lock
	@$(BIN)/python scripts/lock.py

.PHONY: sbom
sbom: $(DEV) ## write the packages of the images as CycloneDX: build/sbom/*.json
	@$(BIN)/python -m venv build/sbom-tool
	@build/sbom-tool/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	@mkdir -p build/sbom
	@for name in gateway encoder decoder; do \
		build/sbom-tool/bin/cyclonedx-py requirements services/$$name/requirements.lock \
			--pyproject pyproject.toml --output-reproducible --of JSON \
			-o build/sbom/$$name.json || exit 1; \
	done
	@ls build/sbom

.PHONY: release
release: $(DEV) ## build wheel, sdist, images' contexts, chart and notes into build/release
	@$(BIN)/python scripts/ensure_helm.py
	@PYTHONPATH=. $(BIN)/python scripts/release.py

.PHONY: clean
clean: ## remove environments, caches and build outputs
	rm -rf $(VENV) $(LIGHT_VENV) .clients build dist *.egg-info .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
