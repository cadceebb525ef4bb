# make demo   train a digit classifier on device "jax"
# make test   run the tests
# make bench  print the speed of ops and models, with ratios
#
# Each sets up .venv first, and only when something it depends on has changed.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
TORCH  ?= 2.13.0

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check

# Compiled programs are kept between runs.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.1

.PHONY: demo test bench notebook clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(PY) examples/digits.py $(ARGS)

test: $(VENV)/.test
	$(PY) -m pytest -n $(JOBS) tests $(ARGS)

# Timed programs must not come from, or wait for, the disk.
bench: $(VENV)/.demo
	env -u JAX_COMPILATION_CACHE_DIR $(PY) benchmarks/dispatch.py $(ARGS)
	env -u JAX_COMPILATION_CACHE_DIR $(PY) benchmarks/models.py $(ARGS)

notebook: $(VENV)/.test
	$(PY) -m pytest tests/test_notebook.py

# The CPU build of torch: from the configured index if it has one, else from
# PyTorch's own. PyPI's build for Linux brings gigabytes of CUDA: last resort.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch $(TORCH) into $(VENV)"
	$(PIP) torch==$(TORCH)+cpu 2>/dev/null \
	  || $(PIP) --index-url https://download.pytorch.org/whl/cpu torch==$(TORCH) \
	  || $(PIP) torch==$(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "installing torchax_tpu[demo] into $(VENV)"
	$(PIP) torch==$(TORCH) -e '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	@echo "installing torchax_tpu[test] into $(VENV)"
	$(PIP) torch==$(TORCH) -e '.[test]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .cache build *.egg-info
