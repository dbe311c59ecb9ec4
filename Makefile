# make help lists the targets; each works in .venv, made on first use. VENV=none: in the current python3, as it is,
# nothing installed, no network.

VENV ?= .venv
# The newest pair with which all tests pass. To raise it: write the next one here, and in tests/pairs.py, tests/versions.py
# and fusednorm/host/triton_compat.py; then `make clean test test-pairs test-versions` must pass.
PAIR ?= torch==2.15.0 triton==3.9.0

ifeq ($(VENV),none)
PYTHON := python3
READY :=
SIDE_BY_SIDE :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile --no-loadscope-reorder
endif
PIP := $(PYTHON) -m pip --disable-pip-version-check install --quiet

.PHONY: help demo test test-versions test-versions-all test-pairs test-integrations simulate mutants test-gpu fuzz bench plot budgets sass lint docs package clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: $(READY)  ## the ops and kernels against float64; a small GPT on stock norms and on ours
	$(PYTHON) -m fusednorm demo

test: $(READY)  ## all tests that need no GPU: about eight minutes on two cores
	$(PYTHON) -m pytest $(SIDE_BY_SIDE)

test-gpu: $(READY)  ## the tests that need a GPU
	$(PYTHON) -m pytest -m gpu

test-versions: $(READY)  ## 150 problems compiled by each Triton for each architecture: within an hour; VERSIONS="--arch 90"
	$(PYTHON) tests/versions.py $(VERSIONS)

PART ?= 1/1
test-versions-all: $(READY)  ## the thousands of problems of `make budgets`, with each Triton, in parts: PART=3/50
	$(PYTHON) tests/versions.py --thorough --part $(PART) $(VERSIONS)

test-pairs: $(READY)  ## what depends on torch and Triton, with four pairs of the two: some ten minutes each; PAIRS="--torch 2.11.0"
	$(PYTHON) tests/pairs.py $(PAIRS)

test-integrations: $(READY)  ## torchtitan, Megatron-Core, Hugging Face and Lightning as released: minutes; STACKS="--stacks trl"
	$(PYTHON) tests/stacks.py $(STACKS)

# Goes on where it was stopped: SIMULATE="--releases 3.9.0 --random 100 --part 3/20".
simulate: $(READY)  ## the simulator's product of problems, and 10,000 random ones over all Tritons: hours on two cores, so in parts
	$(PYTHON) -m tests.simulator.everything $(SIMULATE)

mutants: $(READY)  ## which barrier, wait, arrival or fence of the kernels nobody would miss
	$(PYTHON) -m tests.simulator.mutants $(MUTANTS)

fuzz: $(READY)  ## 20,000 drawn calls of the public face, right and wrong ones, against torch's own functions
	PYTHONPATH=$(CURDIR) $(PYTHON) tests/face/public_face.py --cases 20000

bench: $(READY)  ## our times beside the peers' and the floor, on a GPU; BENCH="--shapes 65536x1024"
	$(PYTHON) -m bench.bench_norm $(BENCH)

plot: $(READY)  ## pictures of the newest results, or of FILES
	$(PYTHON) -m bench.plot $(FILES)

budgets: $(READY)  ## every plan of the planner against the compiler: thousands of builds, hours on two cores
	$(PYTHON) tests/budgets.py --mixed

sass: $(READY)  ## instructions of a sample of the kernels against the committed, with Triton 3.6; SASS=--all for all
	python=$$($(PYTHON) tests/versions.py --environment 3.6.0) && PYTHONPATH=$(CURDIR) $$python tests/sass.py $(SASS)

lint: $(READY)  ## ruff, and mypy on the public face
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

docs: $(READY)  ## the pages and the reference in out/docs/; a warning, or a link to nowhere, is an error
	$(PYTHON) -m sphinx -W --keep-going -q -c docs . out/docs

package: $(READY)  ## sdist and wheels in dist/, pure Python and with the extension, each tried in a fresh environment: minutes
	rm -rf build dist
	$(PYTHON) -m build
	$(PYTHON) -m build --wheel --no-isolation
	$(PYTHON) -m pytest tests/packages.py

clean:  ## what was built, and .venv
	rm -rf build dist out *.egg-info .pytest_cache .ruff_cache .mypy_cache $(filter-out none,$(VENV))

# The stamp makes a second make instant.
$(VENV)/.ready: setup.py
	python3 -m venv $(VENV)
	$(PIP) $(PAIR)
	$(PIP) --editable ".[test,bench,demo,docs]"
	touch $@
