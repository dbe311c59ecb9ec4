# make demo | test | test-gpu | bench | plot | budgets | sass | lint        in .venv, made on first use
# make test VENV=none                               in the current python3, as it is: nothing installed, no network

VENV ?= .venv
TORCH ?= torch==2.13.0

ifeq ($(VENV),none)
PYTHON := python3
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
PIP := $(PYTHON) -m pip --disable-pip-version-check install --quiet

.PHONY: demo test test-gpu bench plot budgets sass lint clean

demo: $(READY)
	$(PYTHON) -m fusednorm demo

test: $(READY)
	$(PYTHON) -m pytest

test-gpu: $(READY)
	$(PYTHON) -m pytest -m gpu

bench: $(READY)
	$(PYTHON) -m bench.bench_norm $(BENCH)

# Pictures of the newest results, or of FILES.
plot: $(READY)
	$(PYTHON) -m bench.plot $(FILES)

# Every plan of the planner against the compiler: thousands of builds, hours on two cores.
budgets: $(READY)
	$(PYTHON) tests/budgets.py --mixed

# The kernels' instructions against those that were committed, where Triton is 3.6: a sample; SASS=--all for every build.
sass: $(READY)
	$(PYTHON) tests/sass.py $(SASS)

lint: $(READY)
	$(PYTHON) -m ruff check .

clean:
	rm -rf build dist out *.egg-info .pytest_cache .ruff_cache $(filter-out none,$(VENV))

# The stamp makes a second make instant. A CPU build of torch brings no Triton: take 3.6.0, and the last numpy that its
# interpreter bears without help.
$(VENV)/.ready: setup.py
	python3 -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PYTHON) -c "import triton" 2>/dev/null || { $(PIP) --no-deps triton==3.6.0 && $(PIP) "numpy<2.4"; }
	$(PIP) --editable ".[test,bench,demo]"
	touch $@
