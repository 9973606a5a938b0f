# make demo   the main job on a small model, from download to an answered chat completion
# make test   checks and all tests
# make help   the rest

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

# The CPU build. Where pip does not find it, it comes from PyTorch's own index.
TORCH := torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Every stage is a program of its own: without compiled modules each would compile ours anew.
unexport PYTHONDONTWRITEBYTECODE

# No test or demo may talk to anything but this machine.
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1
export VLLM_NO_USAGE_STATS := 1

.PHONY: help install demo demo-stop test test-all check format bench bench-decision manifests clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED) ## create .venv with the locked versions

$(INSTALLED): requirements.lock pyproject.toml manifests/images/vllm-cpu/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing the locked versions into $(VENV) (some minutes the first time)"
	$(PIP) install -qq --no-deps $(TORCH) || $(PIP) install -qq --no-deps --index-url $(TORCH_INDEX) $(TORCH)
	$(PIP) install -qq --no-deps -r requirements.lock
	$(PIP) install -qq --no-deps --no-build-isolation gptqmodel==7.6.0 ./manifests/images/vllm-cpu
	$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(INSTALLED) ## acquire, optimize, evaluate, select and serve the demo model
	@$(BIN)/python -m tests.demo

demo-stop: $(INSTALLED) ## stop the endpoint that the demo left serving
	@$(BIN)/slipway serve slipway/demo-llama --stop --store .slipway

test: check ## checks, then the tests, real servers included
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: check ## those too that show the same once more in another way
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: $(INSTALLED) ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## what the orchestration costs, beside the same steps by hand
	$(BIN)/python -m benchmarks.overhead

bench-decision: $(INSTALLED) ## whether ten repeated measurements of the demo's variants give the same decision
	$(BIN)/python -m benchmarks.repeatability --store .slipway --model slipway/demo-llama --config benchmarks/repeatability.yaml

manifests: $(INSTALLED) ## what a cluster applies, made anew from configs/ and the definition
	$(BIN)/python -m pipeline.manifests

clean: ## remove the environment and the demo's store
	rm -rf $(VENV) .slipway
