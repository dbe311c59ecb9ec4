# make demo | test | test-versions | simulate | mutants | test-gpu | bench | plot | budgets | sass | lint
#                                                    in .venv, made on first use
# make test VENV=none                               in the current python3, as it is: nothing installed, no network

VENV ?= .venv
# The newest pair with which all tests pass; Triton where torch brings none. To raise it: write the next ones here; then
# `make clean test test-versions` must pass, and tests/versions.py and fusednorm/triton_compat.py have that Triton.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0

ifeq ($(VENV),none)
PYTHON := python3
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
PIP := $(PYTHON) -m pip --disable-pip-version-check install --quiet

.PHONY: demo test test-versions test-versions-all simulate mutants test-gpu fuzz bench plot budgets sass lint clean

demo: $(READY)
	$(PYTHON) -m fusednorm demo

test: $(READY)
	$(PYTHON) -m pytest

# Every Triton that is supported x every architecture, compiled: some 150 problems each, within an hour on two cores. With
# -all the thousands of `make budgets`, in parts: PART=3/50 and so on. Either goes on where it was stopped.
test-versions: $(READY)
	$(PYTHON) tests/versions.py $(VERSIONS)

PART ?= 1/1
test-versions-all: $(READY)
	$(PYTHON) tests/versions.py --thorough --part $(PART) $(VERSIONS)

# The simulator's whole product of problems with the oldest and the newest Triton, and 10,000 random ones, each with one
# of all: hours on two cores. In parts: SIMULATE="--releases 3.9.0 --random 100 --part 3/20". Goes on where it was stopped.
simulate: $(READY)
	$(PYTHON) -m tests.simulator.everything $(SIMULATE)

# Which barrier, wait, arrival or fence of the kernels nobody would miss.
mutants: $(READY)
	$(PYTHON) -m tests.simulator.mutants $(MUTANTS)

test-gpu: $(READY)
	$(PYTHON) -m pytest -m gpu

# Drawn calls of the public face, right and wrong ones, against torch's own functions.
fuzz: $(READY)
	PYTHONPATH=$(CURDIR) $(PYTHON) tests/public_face.py --cases 20000

bench: $(READY)
	$(PYTHON) -m bench.bench_norm $(BENCH)

# Pictures of the newest results, or of FILES.
plot: $(READY)
	$(PYTHON) -m bench.plot $(FILES)

# Every plan of the planner against the compiler: thousands of builds, hours on two cores.
budgets: $(READY)
	$(PYTHON) tests/budgets.py --mixed

# The kernels' instructions against those that were committed, with Triton 3.6: a sample; SASS=--all for every build.
sass: $(READY)
	python=$$($(PYTHON) tests/versions.py --environment 3.6.0) && PYTHONPATH=$(CURDIR) $$python tests/sass.py $(SASS)

lint: $(READY)
	$(PYTHON) -m ruff check .

clean:
	rm -rf build dist out *.egg-info .pytest_cache .ruff_cache $(filter-out none,$(VENV))

# The stamp makes a second make instant. A CPU build of torch brings no Triton: take ours, and the last numpy that the
# interpreter of 3.6 bears without help.
$(VENV)/.ready: setup.py
	python3 -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PYTHON) -c "import triton" 2>/dev/null || { $(PIP) --no-deps $(TRITON) && $(PIP) "numpy<2.4"; }
	$(PIP) --editable ".[test,bench,demo]"
	touch $@
