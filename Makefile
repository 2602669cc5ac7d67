# The commands of this project. Each makes .venv from constraints.txt first, if it is missing or older than what it
# is made of: `make demo` installs the library and scikit-learn, the others everything that the tests use.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -c constraints.txt

.PHONY: help demo pictures test test-all test-quick test-slurm test-trackers test-data test-carriers test-notebooks test-lightning test-editors test-xla test-pythons test-oldest test-nightly soak check bench docs site \
  site-material vendor clean

help:
	@echo "make demo        train on real handwritten digits, and see what a run leaves behind"
	@echo "make test-quick  the tests that are not marked slow: two minutes on two cores"
	@echo "make test        the tests that are not marked long: ten minutes"
	@echo "make test-all    every test that runs on one machine"
	@echo "make test-slurm  the tests that need a SLURM: starts one of two virtual nodes here (root, Debian), and ends it"
	@echo "make test-trackers  the tests of experiment trackers with the real packages, in an environment over .venv (0.5 GB)"
	@echo "make test-data      the tests of data libraries (litdata, WebDataset, …) with the real packages, in the same way"
	@echo "make test-carriers  the tests of what starts runs on clusters (submitit) with the real packages, in the same way"
	@echo "make test-notebooks  a notebook executed by Jupyter's kernel, in an environment over .venv (0.1 GB)"
	@echo "make test-lightning  Lightning's own demo files after trainer-kit migrate, beside Lightning itself (its wheel, 1 MB)"
	@echo "make test-editors  what mypy, pyright and Pylance say of a user's program; installs pyright (npm, 20 MB)"
	@echo "make test-xla    the tests of torch_xla, on its CPU device, in an environment of its own (2.3 GB)"
	@echo "make test-pythons  the wheel on each of PYTHONS, in an environment of its own: import, command, fit, 900 tests"
	@echo "make test-oldest the same on OLDEST, with the lowest versions that pyproject.toml allows"
	@echo "make test-nightly  the newest torch that pip finds, in an environment of its own: the tests of its private names"
	@echo "make soak        the tests of faults in their long form: KILLS (1000), FLIPS (100000), HOSTILE (10000), LOSSES (200)"
	@echo "make check       format, lint, types, architecture"
	@echo "make bench       what the loop, its checkpoints, samples, engines and plans cost, the first ones beside hand-written ones"
	@echo "make docs        write the generated pages again"
	@echo "make pictures    draw the pictures of docs/pictures again; RUN=1 trains on sixteen engines first"
	@echo "make site        build the site: site/dev, or site/0.2 with VERSION=0.2; serve it: python3 -m http.server -d site"
	@echo "make site-material  build it with mkdocs and mkdocs-material, as a check: build/site-material"
	@echo "make vendor      fetch the run report's plotting library again, and compare it with its checksums (npm)"
	@echo "make clean       remove .venv and caches"

# setuptools builds this package, and DeepSpeed, whose setup also imports torch. Modules are compiled at their first
# import: pip would compile all of torch's, which takes longer than the demo. For the tests they are compiled here.
define INSTALL
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --no-compile setuptools torch numpy
	$(PIP) --quiet --no-compile --no-build-isolation -e ".[$(1)]"
endef

.venv/.demo: constraints.txt pyproject.toml
	@echo "making .venv with torch and scikit-learn (about a minute the first time)"
	$(call INSTALL,examples)
	@touch $@

.venv/.stamp: constraints.txt pyproject.toml
	@echo "making .venv with all that the tests use (a few minutes the first time)"
	$(call INSTALL,dev)
	@echo "compiling it (a minute): what tests import first must not warn of its syntax, and hundreds of processes import it"
	-$(BIN)/python -W ignore -m compileall -q -j 0 .venv/lib
	@touch .venv/.demo $@

# One thread a process: the tests start several at once, and sums come out the same everywhere.
test test-all test-quick test-slurm test-trackers test-data test-carriers test-notebooks test-xla soak check bench: export OMP_NUM_THREADS = 1
# Compiled once: tests start hundreds of processes that import this package.
test test-all test-quick soak: export PYTHONDONTWRITEBYTECODE =
# Tests wait for thousands of small files to be durable: in memory, where 4 GB are free, that takes no time.
ROOM := $(shell df --output=avail /dev/shm 2>/dev/null | tail -n 1)
ifeq ($(shell test -w /dev/shm && test "$(ROOM)" -gt 4000000 && echo yes),yes)
test test-all test-quick test-trackers test-data: export PYTEST_DEBUG_TEMPROOT = /dev/shm
endif

demo: .venv/.demo
	$(BIN)/python examples/digits.py

# Three at a time on two cores: a quarter of the time tests wait, for ranks that start and end, and for limits.
WORKERS ?= 3
SHARED := -n $(WORKERS) --dist worksteal -o tmp_path_retention_policy=failed

test: .venv/.stamp
	$(BIN)/python -m pytest $(SHARED) -m "not long"

test-all: .venv/.stamp
	$(BIN)/python -m pytest $(SHARED)

test-quick: .venv/.stamp
	$(BIN)/python -m pytest $(SHARED) -m "not slow"

test-slurm: .venv/.stamp
	tests/slurm/start $(BIN)/python -m pytest tests/slurm

# Trackers need other versions of some libraries than constraints.txt pins, so they lie over .venv, whose torch they use.
TRACKERS := .venv-trackers/bin/python
.venv-trackers/.stamp: .venv/.stamp tests/loggers/trackers.txt
	@echo "making .venv-trackers (a few minutes the first time)"
	test -x $(TRACKERS) || $(BIN)/python -m venv --without-pip .venv-trackers
	for site in .venv-trackers/lib/python3*/site-packages; do \
	  printf '%s\n' "$(CURDIR)" "$(CURDIR)"/.venv/lib/python3*/site-packages > $$site/shared.pth; done
	$(TRACKERS) -m pip install --no-deps -r tests/loggers/trackers.txt
	@touch $@

# ClearML is in .venv, so it runs here and in make test-all.
test-trackers: .venv-trackers/.stamp
	$(TRACKERS) -m pytest tests/loggers/test_trackers.py -rs

# Libraries of data sets and loaders ask for other versions too, and one of them for a torchvision that it hardly needs.
LIBRARIES := .venv-data/bin/python
.venv-data/.stamp: .venv/.stamp tests/data/libraries.txt
	@echo "making .venv-data (a few minutes the first time)"
	test -x $(LIBRARIES) || $(BIN)/python -m venv --without-pip .venv-data
	for site in .venv-data/lib/python3*/site-packages; do \
	  printf '%s\n' "$(CURDIR)" "$(CURDIR)"/.venv/lib/python3*/site-packages > $$site/shared.pth; done
	$(LIBRARIES) -m pip install --no-deps -r tests/data/libraries.txt
	@touch $@

test-data: .venv-data/.stamp
	$(LIBRARIES) -m pytest tests/data/test_libraries.py -rs

# What starts runs on clusters: no other test needs it, so it lies over .venv, whose torch it uses.
CARRIERS := .venv-carriers/bin/python
.venv-carriers/.stamp: .venv/.stamp tests/launch/carriers.txt
	test -x $(CARRIERS) || $(BIN)/python -m venv --without-pip .venv-carriers
	for site in .venv-carriers/lib/python3*/site-packages; do \
	  printf '%s\n' "$(CURDIR)" "$(CURDIR)"/.venv/lib/python3*/site-packages > $$site/shared.pth; done
	$(CARRIERS) -m pip install --no-deps -r tests/launch/carriers.txt
	@touch $@

test-carriers: .venv-carriers/.stamp
	$(CARRIERS) -m pytest tests/launch/test_carriers.py -rs

# No test of the others needs a kernel and its widgets, so they lie over .venv, whose torch they use.
NOTEBOOKS := .venv-notebooks/bin/python
.venv-notebooks/.stamp: .venv/.stamp tests/notebooks/notebooks.txt
	test -x $(NOTEBOOKS) || $(BIN)/python -m venv --without-pip .venv-notebooks
	for site in .venv-notebooks/lib/python3*/site-packages; do \
	  printf '%s\n' "$(CURDIR)" "$(CURDIR)"/.venv/lib/python3*/site-packages > $$site/shared.pth; done
	$(NOTEBOOKS) -m pip install --no-deps -r tests/notebooks/notebooks.txt
	@touch $@

test-notebooks: .venv-notebooks/.stamp
	$(NOTEBOOKS) -m pytest tests/notebooks -rs

# Lightning and torchmetrics ask for more than constraints.txt has: their files alone, in a directory of their own.
.venv-lightning/.stamp: .venv/.stamp
	$(BIN)/python -m pip install --no-deps --target .venv-lightning lightning==2.6.6 torchmetrics==1.9.0
	@touch $@

test-lightning: export LIGHTNING_FILES = $(CURDIR)/.venv-lightning
test-lightning: .venv-lightning/.stamp
	$(BIN)/python -m pytest tests/compat/test_lightning_files.py tests/compat/test_fabric_examples.py -rs

# Pylance is pyright inside an editor.
.venv-editors/.stamp:
	npm install --silent --no-save --prefix .venv-editors pyright@1.1.414
	@touch $@

test-editors: .venv/.stamp .venv-editors/.stamp
	$(BIN)/python -m pytest tests/test_typing.py -rs

# torch_xla goes with one build of torch, and with none of the other libraries that ask for a newer one.
XLA := .venv-xla/bin/python
.venv-xla/.stamp: constraints.txt pyproject.toml tests/xla/stub_libraries.py
	@echo "making .venv-xla (a few minutes the first time)"
	test -x $(XLA) || $(PYTHON) -m venv .venv-xla
	$(XLA) -m pip install --no-deps torch==2.9.0 torch_xla==2.9.0 torchdata==0.11.0
	sed '/^torch==/d' constraints.txt > .venv-xla/constraints.txt
	$(XLA) -m pip install -c .venv-xla/constraints.txt absl-py click docstring-parser filelock fsspec jinja2 jsonargparse \
	  lightning-utilities networkx numpy pytest pytest-timeout PyYAML requests safetensors setuptools sympy tensorboard \
	  tqdm typing_extensions xxhash
	$(XLA) tests/xla/stub_libraries.py .venv-xla/lib/python3*/site-packages
	@touch $@

# The tests' own conftest is for the other environment. The process's devices are chosen when it starts.
test-xla: export PYTHONPATH = .
test-xla: export PJRT_DEVICE = CPU
test-xla: export TF_CPP_MIN_LOG_LEVEL = 2
test-xla: .venv-xla/.stamp
	$(XLA) -m pytest --confcutdir=tests/xla tests/xla
	CPU_NUM_DEVICES=4 XLA_FLAGS=--xla_force_host_platform_device_count=4 $(XLA) -m pytest --confcutdir=tests/xla tests/xla

# Each is installed, tested and removed, 2 GB and three minutes; on a CUDA build of torch the XLA tests' stubs help.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
OLDEST ?= python3.10
test-pythons: .venv/.stamp
	$(BIN)/python tests/on_pythons.py $(PYTHONS)

test-oldest: .venv/.stamp
	$(BIN)/python tests/on_pythons.py --oldest $(OLDEST)

NIGHTLY ?= $(PYTHON)
test-nightly: .venv/.stamp
	$(BIN)/python tests/on_pythons.py --newest --work .venv-nightly $(NIGHTLY)

KILLS ?= 1000
FLIPS ?= 100000
HOSTILE ?= 10000
LOSSES ?= 200
soak: .venv/.stamp
	KILLS=$(KILLS) $(BIN)/python -m pytest tests/faults/test_kills.py tests/faults/test_resume_auto.py -k soak
	FLIPS=$(FLIPS) $(BIN)/python -m pytest tests/faults/test_damage_anywhere.py
	CYCLES=0 $(BIN)/python -m pytest tests/faults/test_save_cycle.py
	LOSSES=$(LOSSES) $(BIN)/python -m pytest tests/faults/test_power_loss.py
	HOSTILE=$(HOSTILE) $(BIN)/python -m pytest tests/faults/test_hostile_checkpoints.py

check: .venv/.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict trainer_kit tests/typing_contracts.py tests/typing_user.py
	$(BIN)/python -m pytest tests/test_architecture.py

bench: .venv/.stamp
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/samples.py
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/plan.py

docs: .venv/.stamp
	for script in docs/generate_*.py; do $(BIN)/python $$script || exit 1; done

# The report is photographed where there is a Chromium.
pictures: .venv/.stamp
	$(BIN)/python docs/draw/mesh.py
	$(BIN)/python docs/draw/curves.py $(if $(RUN),--run)
	$(BIN)/python docs/draw/tutorials.py
	$(BIN)/python docs/draw/report.py

# The site is built from the text of the sources: its environment needs neither torch nor this package. With SOURCE_URL,
# the address below which the repository's files are shown, each class and function links to its source.
VERSION ?= dev
.venv-site/.stamp: docs/requirements.txt
	@echo "making .venv-site (half a minute the first time)"
	test -x .venv-site/bin/python || $(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --no-deps -r docs/requirements.txt
	@touch $@

site: .venv-site/.stamp
	SITE_DIR=site/$(VERSION) .venv-site/bin/zensical build --strict --clean
	.venv-site/bin/python docs/finish_site.py site

.venv-site/.material: .venv-site/.stamp docs/requirements-material.txt
	.venv-site/bin/python -m pip install --quiet --no-deps -r docs/requirements-material.txt
	@touch $@

site-material: .venv-site/.material
	NO_MKDOCS_2_WARNING=1 SITE_DIR=build/site-material .venv-site/bin/python -m mkdocs build --strict --clean

# What npm gives must be, byte by byte, what the repository ships: another version needs new checksums first.
UPLOT := 1.6.32
VENDOR := trainer_kit/report/vendor
vendor:
	work=$$(mktemp -d) && npm pack --silent --pack-destination $$work uplot@$(UPLOT) \
	  && tar xzf $$work/uplot-$(UPLOT).tgz -C $$work \
	  && cp $$work/package/dist/uPlot.iife.min.js $$work/package/dist/uPlot.min.css $(VENDOR)/ \
	  && cp $$work/package/LICENSE $(VENDOR)/uPlot.LICENSE; code=$$?; rm -rf $$work; exit $$code
	cd $(VENDOR) && sha256sum --check SHA256SUMS

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
