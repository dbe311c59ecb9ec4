# `make help` lists the targets. They run in .venv, which the first one makes. VENV=none runs them in the current
# python3, installs nothing and uses no network.

VENV ?= .venv
# The newest pair with which all tests pass. To raise it, write the new pair here and in tests/pairs.py,
# tests/versions.py and fusednorm/host/triton_compat.py. Then `make clean test test-pairs test-versions` must pass.
PAIR ?= torch==2.15.0 triton==3.9.0

ifeq ($(VENV),none)
PYTHON := python3
READY :=
SIDE_BY_SIDE :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
SIDE_BY_SIDE := --numprocesses 2 --dist worksteal
endif
# Tests start many processes that import the same files.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(PYTHON) -m pip --disable-pip-version-check install

.PHONY: help demo test test-bench test-versions test-versions-all test-pairs test-integrations simulate mutants test-gpu fuzz fuzz-gpu bench plot budgets sass lint docs package clean

help:  ## prints this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: $(READY)  ## checks the ops and kernels against float64, trains a small GPT on stock norms and on ours
	$(PYTHON) -m fusednorm demo
	$(PYTHON) -m tests.simulator.demo

test: $(READY)  ## runs all tests of the package that need no GPU
	$(PYTHON) -m pytest $(SIDE_BY_SIDE) --ignore tests/bench

test-bench: $(READY)  ## runs the tests of the tools in bench/, without a GPU
	$(PYTHON) -m pytest $(SIDE_BY_SIDE) tests/bench

test-gpu: $(READY)  ## runs the tests that need a GPU
	$(PYTHON) -m pytest -m gpu

test-versions: $(READY)  ## compiles a list of problems with each Triton for each architecture: an hour; VERSIONS="--arch 90"
	$(PYTHON) tests/versions.py $(VERSIONS)

PART ?= 1/1
test-versions-all: $(READY)  ## compiles the problems of `make budgets` with each Triton, in parts: PART=3/50
	$(PYTHON) tests/versions.py --thorough --part $(PART) $(VERSIONS)

test-pairs: $(READY)  ## tests what depends on torch and Triton with four pairs: ten minutes each; PAIRS="--torch 2.11.0"
	$(PYTHON) tests/pairs.py $(PAIRS)

test-integrations: $(READY)  ## tests torchtitan, Megatron-Core, Hugging Face, Lightning: minutes; STACKS="--stacks trl"
	$(PYTHON) tests/stacks.py $(STACKS)

# A run continues where the last one was stopped. SIMULATE="--releases 3.9.0 --random 100 --part 3/20" runs a part.
simulate: $(READY)  ## simulates a grid of problems and 10,000 random ones: hours on two cores, so in parts
	$(PYTHON) -m tests.simulator.everything $(SIMULATE)

mutants: $(READY)  ## lists the barriers, waits, arrivals and fences that can be removed without a failure
	$(PYTHON) -m tests.simulator.mutants $(MUTANTS)

fuzz: $(READY)  ## compares 20,000 random calls of the public functions, valid or not, and 1000 compiled models with torch's own
	PYTHONPATH=$(CURDIR) $(PYTHON) tests/face/public_face.py --cases 20000
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PYTHON) tests/integrations/random_graphs.py --cases 1000

# A run continues where the last one was stopped. FUZZ="--minutes 8 --seed 1" changes it.
fuzz-gpu: $(READY)  ## compares 100,000 random calls of every op with float64, on a GPU: an hour with 16 processes
	$(PYTHON) -m tests.fuzz $(FUZZ)

bench: $(READY)  ## times our norms, the peers' and the floor, on a GPU; BENCH="--shapes 65536x1024"
	$(PYTHON) -m bench.bench_norm $(BENCH)

plot: $(READY)  ## draws pictures of the newest results, or of FILES
	$(PYTHON) -m bench.plot $(FILES)

budgets: $(READY)  ## compares every plan's budget with the compiler: thousands of builds, hours on two cores
	$(PYTHON) tests/budgets.py --mixed

sass: $(READY)  ## compares kernels' instructions with the committed hashes, Triton 3.6
	python=$$($(PYTHON) tests/versions.py --environment 3.6.0) && PYTHONPATH=$(CURDIR) $$python tests/sass.py $(SASS)

lint: $(READY)  ## runs ruff, and mypy on the public API
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

docs: $(READY)  ## makes pages and reference in out/docs/; warnings and broken links are errors
	$(PYTHON) -m sphinx -W --keep-going -q -c docs . out/docs

package: $(READY)  ## builds sdist and wheel in dist/, and tries them with the oldest and the newest torch: minutes, 6 GB
	rm -rf build dist
	$(PYTHON) -m build
	$(PYTHON) -m pytest tests/packages.py $(PACKAGE)
	cp docs/releasing.md dist/
	@echo "dist/releasing.md says what to do next."

clean:  ## removes what was built, and .venv
	rm -rf build dist out *.egg-info .pytest_cache .ruff_cache .mypy_cache $(filter-out none,$(VENV))

# The stamp file tells the next make that the environment is complete.
$(VENV)/.ready: setup.py
	@echo "Making an environment in $(VENV), once: pip brings about 5 GB, then the host side in C++ is compiled."
	python3 -m venv $(VENV)
	$(PIP) $(PAIR)
	$(PIP) --editable ".[test,bench,demo,docs]"
	$(PYTHON) -m fusednorm build || echo "Without a C++ compiler the host side runs in Python."
	touch $@
