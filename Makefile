# make demo | make test | make test-full | make lint; each installs into .venv on first use.
# Kernel tests execute PTX on the emulator in tests/emulator: test-full runs every case under all its
# schedules, and keeps the result in tests/full.jsonl; test runs a sample of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# mypy reads the packages under their import names: a tree of links, as the wheel lays them out.
TYPED := $(VENV)/typed

.PHONY: demo test test-full lint clean

demo: $(VENV)/installed
	$(BIN)/python examples/video_attention.py

# Several test processes share the cores: threads that spin while they wait would slow each other.
test test-full: export OMP_WAIT_POLICY = PASSIVE

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto -m "not slow"

test-full: $(VENV)/installed
	$(BIN)/python tests/full.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/sparse_atten
	ln -s $(CURDIR)/interface/* $(TYPED)/sparse_atten/
	ln -s $(CURDIR)/cute_kernels $(CURDIR)/csr $(CURDIR)/packing $(CURDIR)/scheduler $(CURDIR)/topk $(TYPED)/sparse_atten/
	MYPYPATH=$(TYPED) $(BIN)/mypy -p sparse_atten

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,demo]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info demo_output
