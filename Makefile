# Every action of a developer, one word each. `make test` and `make demo` set up what they need.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# PyTorch for CUDA brings a version of its own. The tests run its kernels in Triton's interpreter where there is no GPU.
TRITON ?= triton==3.9.0; sys_platform == 'linux' and platform_machine == 'x86_64'
# The exact versions that are tested. Without them, pip takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
# pip, or uv. uv takes a fifth of the time, and does not follow pip's settings, such as another index.
INSTALLER ?= pip
UV := $(BIN)/uv
# Most modules of large packages are never imported. Python compiles the others at their first import.
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL_BY_pip = $(PIP) $(if $(filter-out $(BIN)/python,$(1)),--python $(1)) install --quiet --no-compile
INSTALL_BY_uv = $(UV) pip install --quiet --python $(1)
# Installs into the environment of an interpreter.
install_into = $(call INSTALL_BY_$(INSTALLER),$(1))
INSTALL = $(call install_into,$(BIN)/python) $(CONSTRAINTS:%=-c %)
NEEDED_TO_INSTALL := $(BIN)/python $(if $(filter uv,$(INSTALLER)),$(UV))
READY := $(VENV)/.ready
LINKS := build/links
PACKAGES := manifests profiles evaluation runtime shipping serving reporting compiler cli
NATIVE := $(shell find runtime/kernels/native -type f -not -path '*/wheels/*' 2>/dev/null)

# Tests start hundreds of processes. Without compiled modules each one compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test tests collected versions quantization-tools gguf-converter shipping-tools serving-clients test-newest test-oldest update-dependencies lint format typecheck contracts gates oracles bench bench-shapes wheels schema docs site example-bundle example-smollm2 figures clean links

help:  ## Show this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY)  ## Make .venv and install everything into it

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "error: $(PYTHON) is older than 3.10; name another one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@command -v g++ >/dev/null || command -v c++ >/dev/null || \
	    { echo "error: no C++ compiler; on Debian and Ubuntu: apt-get install g++" >&2; exit 1; }
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' || \
	    { echo "error: $(PYTHON) has no headers; on Debian and Ubuntu: apt-get install python3-dev" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Torch comes first: what follows then finds it there and leaves it alone. It always comes by pip, whose settings say which
# build. The stamp is renewed when the settings or the native sources change; an install that is complete takes seconds.
$(READY): pyproject.toml $(CONSTRAINTS) $(NATIVE) | $(NEEDED_TO_INSTALL)
	$(call INSTALL_BY_pip,$(BIN)/python) $(CONSTRAINTS:%=-c %) "$(TORCH)"
	$(BIN)/python -c "import triton" 2>/dev/null || $(INSTALL) "$(TRITON)"
	$(INSTALL) "scikit-build-core>=0.11" "nanobind>=2.4" ninja cmake
	PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation $(BUILD_DIR:%=-C build-dir=%) -e ".[dev]"
	@touch $@

links:
	@mkdir -p $(LINKS)/moec
	@for package in $(PACKAGES); do ln -sfn ../../../$$package $(LINKS)/moec/$$package; done
	@for package in bench tests; do ln -sfn ../../$$package $(LINKS)/$$package; done

demo: $(READY)  ## Compile the example to a 2 % loss, run it, evaluate it, show the tables
	$(BIN)/moec demo

# The tools that wrote quantized checkpoints, for tests of the readers. They do not import as a whole next to today's
# transformers, and one has a package `tests`, so they are kept apart. Without them their tests are not run.
TOOLS := build/quantization-tools
TOOL_PACKAGES = auto-gptq==0.7.1 autoawq==0.2.9 compressed-tensors==0.19.0 loguru==0.7.3 accelerate==1.15.0 psutil==7.2.2

quantization-tools: $(TOOLS)/.ready  ## Fetch AutoGPTQ, AutoAWQ and compressed-tensors, for the tests of their layouts

$(TOOLS)/.ready: | $(BIN)/python
	@BUILD_CUDA_EXT=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TOOLS) \
	    $(TOOL_PACKAGES) && touch $@ || echo "NOT RUN: tests of quantized checkpoints, because pip could not install their tools" >&2

# llama.cpp's converter, from the sources that its binding for Python brings. The tools of the venv tell pip its name.
CONVERTER := build/llama.cpp
CONVERTER_PACKAGE = llama-cpp-python==0.3.36
CONVERTER_FILES = convert_hf_to_gguf.py conversion gguf-py

gguf-converter: $(CONVERTER)/.ready  ## Fetch llama.cpp's converter, for the tests of GGUF files

$(CONVERTER)/.ready: | $(READY)
	@mkdir -p $(CONVERTER) && PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip download --quiet --disable-pip-version-check \
	    --no-deps --no-binary :all: --no-build-isolation --dest $(CONVERTER) $(CONVERTER_PACKAGE) && \
	    tar xzf $(CONVERTER)/*.tar.gz -C $(CONVERTER) --strip-components=3 --wildcards \
	    $(CONVERTER_FILES:%='*/vendor/llama.cpp/%') && rm $(CONVERTER)/*.tar.gz && touch $@ || \
	    echo "NOT RUN: tests of converted GGUF files, because pip could not fetch llama.cpp" >&2

# What the tests of shipping compare with. Its packages pin versions of their own, so it is an environment of its own.
SHIPPING_TOOLS := build/shipping-tools

shipping-tools: $(SHIPPING_TOOLS)/.ready  ## Fetch model_signing and moto, for the tests of signatures and of object storage

$(SHIPPING_TOOLS)/.ready: tests/shipping/tools.txt | $(NEEDED_TO_INSTALL)
	@$(BIN)/python -m venv --clear --without-pip $(SHIPPING_TOOLS)
	@$(call install_into,$(SHIPPING_TOOLS)/bin/python) --no-deps -r tests/shipping/tools.txt && touch $@ || \
	    echo "NOT RUN: tests of signatures and of object storage, because $(INSTALLER) could not install their tools" >&2

# Clients of `moec serve`. They see the packages of the project, so that only what it lacks is fetched.
SERVING_CLIENTS := build/serving-clients

serving-clients: $(SERVING_CLIENTS)/.ready  ## Fetch openai, litellm, LangChain and lm-evaluation-harness, for the tests of the server

$(SERVING_CLIENTS)/.ready: tests/serving/clients/clients.txt | $(NEEDED_TO_INSTALL)
	@$(BIN)/python -m venv --clear --without-pip $(SERVING_CLIENTS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    "$$($(SERVING_CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	@$(call install_into,$(SERVING_CLIENTS)/bin/python) --no-deps -r tests/serving/clients/clients.txt && touch $@ || \
	    echo "NOT RUN: tests of the server's clients, because $(INSTALLER) could not install them" >&2

# Expression of pytest that chooses the tests.
MARKED ?= not slow

# Processes of the tests. Some tests wait, so two processors have work for three.
WORKERS ?= 3

# Types, lint and contracts are checked while the tests begin: each of these checks uses one processor.
test: $(READY)  ## Set up and run the whole fast suite, lint, types and contracts
	@$(MAKE) --no-print-directory -j2 lint contracts typecheck tests

# Work stealing: each process gets a part in one piece, so that fixtures of a module are made once, and all end together.
tests: $(READY) quantization-tools gguf-converter shipping-tools serving-clients
	@echo "The fast suite takes about 10 minutes on two free cores. The slow tests are in: make gates-full"
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "$(MARKED)"

# Three processes that begin at once would each compile all modules of the tests and of what they import. If a module
# cannot be imported, the tests say so.
collected: $(READY)  ## Compile the modules of all tests, in one process
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true

# Other versions than the tested ones, each in a new environment of its own; no linters, whose newest rules prove nothing.
OTHER_VERSIONS = rm -rf .venv-$(1) && $(MAKE) versions tests VENV=.venv-$(1) BUILD_DIR='build/$(1)/{wheel_tag}' CONSTRAINTS=$(2)

test-newest:  ## Run the suite with the newest versions that pyproject.toml allows (torch apart)
	$(call OTHER_VERSIONS,newest,)

test-oldest: build/oldest.txt  ## Run the suite with the oldest versions that pyproject.toml allows (torch apart)
	$(call OTHER_VERSIONS,oldest,$(abspath build/oldest.txt))

versions: $(READY)
	@$(BIN)/python -m pip list --disable-pip-version-check

UV_COMPILE = $(UV) pip compile pyproject.toml --quiet --no-annotate --no-header
# What torch's other builds need is left out: each names its own exact versions.
WITHOUT_CUDA = grep -vE '^(nvidia|cuda|triton)'

$(UV): | $(BIN)/python
	$(call INSTALL_BY_pip,$(BIN)/python) uv

update-dependencies: $(UV)  ## Write constraints.txt anew: the newest versions, for every Python and extra
	@mkdir -p build
	echo "$(TORCH)" > build/torch.txt
	$(UV_COMPILE) -c build/torch.txt --universal --python-version 3.10 --upgrade --extra dev --extra bench --extra fuzz --extra wheels > build/newest.txt
	{ echo "# Exact versions of everything that make installs. Written by: make update-dependencies"; \
	    $(WITHOUT_CUDA) build/newest.txt; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

build/oldest.txt: pyproject.toml $(UV)
	@mkdir -p build
	echo "$(TORCH)" > build/torch.txt
	$(UV_COMPILE) -c build/torch.txt --resolution lowest-direct --extra dev | $(WITHOUT_CUDA) > $@

lint: $(READY)  ## ruff
	$(BIN)/ruff check .

format: $(READY)  ## Let ruff format the tree
	$(BIN)/ruff format .

typecheck: $(READY) links  ## mypy, strict, on the packages and bench
	cd $(LINKS) && ../../$(BIN)/mypy --config-file ../../pyproject.toml $(PACKAGES:%=-p moec.%) -p bench

contracts: $(READY) links  ## Who may import whom
	PYTHONPATH=$(LINKS) $(BIN)/lint-imports

gates: $(READY)  ## Run the tests of the gates alone, slow ones included
	MOEC_SLOW=1 $(BIN)/python -m pytest -m gate

oracles: $(READY)  ## Hold every family against its oracle, and nothing else
	$(BIN)/python -m pytest -n 2 --dist loadscope -m oracle

bench: $(READY)  ## The yardstick beside llama.cpp and ik_llama.cpp: two hours, 50 GB in build/yardstick, root
	PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation -e ".[dev,bench]"
	$(BIN)/python -m bench.yardstick build/yardstick --results build/yardstick/results

bench-shapes: $(READY)  ## Shapes of seven published models, and llama.cpp: hours, 40 GB in build/shapes, root
	PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation -e ".[dev,bench]"
	$(BIN)/python -m bench.shapes build/shapes --results build/shapes/results

wheels: $(READY)  ## Build wheels for x86-64 and ARM into dist/; 10 minutes. Other headers: WHEELS="--headers 3.10=FOLDER"
	$(INSTALL) "ziglang>=0.17" "auditwheel>=6.4" "abi3audit>=0.0.20"
	$(BIN)/python -m moec.runtime.kernels.native.wheels -o dist $(WHEELS)

schema: $(READY)  ## Write manifests/schema.json from the dataclasses
	@mkdir -p build
	$(BIN)/python -m moec.cli.documents schema > build/schema.json
	mv build/schema.json manifests/schema.json

docs: $(READY)  ## Write docs/cli.md from the commands
	@mkdir -p build
	$(BIN)/python -m moec.cli.documents commands > build/cli.md
	mv build/cli.md docs/cli.md

# zensical needs Python 3.11. It reads mkdocs.yml, and so does mkdocs-material, which takes its place elsewhere.
site: $(READY)  ## Build the documents as a site in build/site
	@test -x $(BIN)/zensical || $(INSTALL) "mkdocs-material>=9.5"
	@if test -x $(BIN)/zensical; then $(BIN)/zensical build --strict; else $(BIN)/mkdocs build --strict; fi

example-bundle: $(READY)  ## Compile examples/bundle anew: 4 to 20 minutes on 2 cores
	$(BIN)/moec compile examples/model --loss 2% --data examples/data --task gsm8k -o build/example-bundle --overwrite
	$(BIN)/python -m tests.gates.shipped_bundle > build/machine.json
	rm -rf examples/bundle
	cp -r build/example-bundle examples/bundle
	mv build/machine.json examples/bundle.machine.json

example-smollm2: $(READY)  ## Make the example of natural weights in build/example-smollm2: over an hour on 2 cores, on Debian
	$(INSTALL) gguf
	cd examples && ../$(BIN)/python -m example_smollm2 --folder ../build/example-smollm2

figures: $(READY)  ## Draw docs/pictures from bench/results
	$(BIN)/python -m bench.figures

clean:  ## Remove what was built, .venv included
	rm -rf build dist $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: papers

papers: $(READY)  ## Measure and draw the figures of the papers that have no result in build/papers; 60 min
	$(BIN)/python -m bench.papers

# Tests of the chat page drive Debian's chromium with it. The package has 165 MB, so CI goes without.
PAGE_DRIVER := build/page-driver
PAGE_DRIVER_PACKAGES := playwright==1.65.2 greenlet==3.5.6

.PHONY: page-driver
page-driver: $(PAGE_DRIVER)/.ready  ## Fetch playwright, for the tests of pages; they need Debian's chromium, too

$(PAGE_DRIVER)/.ready: | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(PAGE_DRIVER) \
	    $(PAGE_DRIVER_PACKAGES) && touch $@ || echo "NOT RUN: tests of pages, because pip could not install playwright" >&2

.PHONY: fuzz sanitize gates-full

fuzz: $(READY)  ## Fuzz the parsers and the extension's calls, SECONDS each (60); Linux on x86-64
	$(INSTALL) "atheris>=2.3"
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60)

# A package of its own in an environment of its own, which sees
# the packages of the other one but not its links to the tree.
SANITIZED := build/sanitize/venv
SANITIZED_SITE = $$($(SANITIZED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
SANITIZERS = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

sanitize: $(READY)  ## Tests of the kernels and the native cache under AddressSanitizer and UBSan: 12 min, gcc
	test -x $(SANITIZED)/bin/python || $(BIN)/python -m venv --without-pip $(SANITIZED)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$(SANITIZED_SITE)/tested.pth"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation \
	    --no-deps --upgrade --target "$(SANITIZED_SITE)" --config-settings build-dir=build/sanitize/objects \
	    --config-settings cmake.define.MOEC_SANITIZE=ON .
	$(SANITIZERS) $(SANITIZED)/bin/python -m pytest -p no:cacheprovider tests/sanitized \
	    tests/kernels --ignore tests/kernels/test_instruction_sets.py tests/runtime/expert_cache/test_native_cache.py \
	    tests/runtime/expert_cache/test_native_residency.py tests/runtime/model/test_one_call.py tests/runtime/model/test_one_call_faults.py
	$(SANITIZERS) $(SANITIZED)/bin/python -m tests.fuzz.native $(or $(SECONDS),60) 1 build/sanitize/call

gates-full: $(READY) page-driver  ## Every test with its full counts, the slow ones, the kept inputs and all faults: hours
	MOEC_FULL_GATES=1 MOEC_SLOW=1 $(BIN)/python -m pytest
