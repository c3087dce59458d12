# Needs make and a Python of 3.11 or later; all else is installed into .venv, as constraints.txt says.
#
#   make demo    the demonstration: installs what it needs, trains over a failing network, writes demo.json
#   make check   the inner loop, about two minutes on two cores: lint, types and unit
#   make test    every check, as CI runs them: check, then system, sim and wheel; no test twice
#   make lint    ruff (rules and format), codespell, the import contracts
#   make types   mypy --strict on both packages
#   make unit    pytest: tests of one module each that start no process, open no socket and do not take long
#   make system  pytest: all others, against the source tree
#   make sim     some forty clusters on a virtual clock, each broken in another way; every invariant has to hold
#   make docs    the documentation site, in build/docs/index.html; strict: no broken link, no public name without a page
#   make wheel   what only the wheel can break, in an environment that cannot see the source tree
#   make dist    what a release uploads, in dist: the wheel and the sources it is built from, looked at by twine
#   make deep    before a release: all tests, with every case of which test takes some, and sweep; hours
#   make sweep   as sim, 5,000 clusters; SEEDS=5000:10000 make sweep takes others
#   make torch-suites SUITES=...   the tests that torch and torchft ship, over Gloo and over quicoll, in an environment of
#                yours at that path, for another torch than that of VENV; hours. It needs what quicoll and its extra
#                "torch" need, expecttest, and for torchft's tests torchft-nightly and parameterized
#   make compiled   both packages with their hot modules compiled, in build/compiled (needs a C compiler and Python.h):
#                PYTHONPATH=build/compiled .venv/bin/quicoll bench allreduce
#   make bench   the benchmarks
#   make clean   everything that the above have made
#
# PYTHON=python3.13 make test takes another interpreter; VENV=... another place for the environment; WORKERS=8 another
# number of processes for pytest.

PYTHON ?= python3
VENV ?= .venv
WHEEL_VENV := $(VENV)-wheel
TWINE_VENV := $(VENV)-twine
BIN := $(VENV)/bin
HERE := $(CURDIR)
# Processes for pytest: as many as there are cores, and one more where a part of the tests waits for deadlines. Eight at
# most: each takes up to 3 GiB.
BUSY := $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 8))')
WAITING := $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 8))')
# Tests go to whoever has none left, those of a file as far as possible to one, since they share what is slow to make.
PARALLEL = --numprocesses=$(or $(WORKERS),$(1)) --dist=worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_PROGRESS_BAR := off
# A path of the caller's must not decide what the checks import.
unexport PYTHONPATH
unexport PYTHONHOME
# Nor may one that keeps no bytecode: hundreds of processes would compile hundreds of modules each, and every test file.
unexport PYTHONDONTWRITEBYTECODE

UNIT = $(BIN)/python -m pytest $(call PARALLEL,$(BUSY)) -m quick tests/unit tests/transport
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell && $(BIN)/lint-imports --no-cache --no-logo
# For the oldest Python and the newest: typeshed differs between them, and whoever compiles does so by that of his own.
TYPES = for version in 3.11 3.13; do $(BIN)/mypy --strict --python-version $$version -p quicoll -p quicoll_transport || exit; done

# Where there is a C compiler, whole clusters and processes run with the hot modules compiled, as most users have them, and
# tests of one module with the source; `make deep` runs all with the source. Elsewhere nothing is compiled, and it says so.
COMPILED := build/compiled
COMPILER := $(shell $(PYTHON) -c 'import os, shutil, sysconfig as s; \
	print(os.path.exists(os.path.join(s.get_path("include"), "Python.h")) and shutil.which((s.get_config_var("CC") or "cc").split()[0]) or "")')
NO_COMPILER = @echo 'no C compiler or no Python.h: nothing is compiled, all tests run with the source'
# With -P and PYTHONSAFEPATH no working directory puts the source tree in front of it.
WITH_COMPILED = $(if $(COMPILER),PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(COMPILED)))

PIP_INSTALL = -m pip install --quiet --constraint constraints.txt

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo check test lint types unit system sim docs wheel dist compiled deep sweep torch-suites bench clean

demo: $(VENV)/.demo
	$(BIN)/quicoll demo --json demo.json

# mypy is one process, so all else runs beside it. What it finds out it keeps in .mypy_cache for the next time.
check: $(VENV)/.dev
	mkdir -p build
	( $(TYPES) ) >build/types.txt 2>&1 & types=$$!; \
	$(LINT) && $(UNIT); rest=$$?; \
	wait $$types; types=$$?; cat build/types.txt; exit $$((types | rest))

# Most of `wheel` is one process, so it runs beside the first part of `system`.
test: check
	mkdir -p build
	$(MAKE) wheel >build/wheel.txt 2>&1 & wheel=$$!; trap 'kill $$wheel' INT TERM; \
	$(MAKE) system sim; rest=$$?; \
	wait $$wheel; wheel=$$?; cat build/wheel.txt; exit $$((wheel | rest))

lint: $(VENV)/.dev
	$(LINT)

types: $(VENV)/.dev
	$(TYPES)

unit: $(VENV)/.dev
	$(UNIT)

# To compile is one process, and the tests that need the source wait for it no more than it for them.
system: $(VENV)/.dev
	mkdir -p build
	$(if $(COMPILER),$(COMPILED_BESIDE_INTERPRETED),$(NO_COMPILER))
	$(WITH_COMPILED) $(BIN)/python -P -m pytest $(call PARALLEL,$(WAITING)) -m 'not quick'

COMPILED_BESIDE_INTERPRETED = $(MAKE) compiled >build/compiled.txt 2>&1 & compiled=$$!; trap 'kill $$compiled' INT TERM; \
	$(BIN)/python -m pytest $(call PARALLEL,$(BUSY)) -m 'interpreted and not quick'; rest=$$?; \
	wait $$compiled; compiled=$$?; cat build/compiled.txt; exit $$((compiled | rest))

# The seeds that meet most in a minute; tests/sim/test_swarm.py holds what they have to meet.
sim: $(VENV)/.dev $(if $(COMPILER),$(COMPILED)/.done)
	mkdir -p build
	$(WITH_COMPILED) $(BIN)/quicoll sim --seeds $$($(BIN)/python tests/helpers/swarm_seeds.py) --json build/sim.json

SEEDS ?= 0:5000

sweep: $(VENV)/.dev $(if $(COMPILER),$(COMPILED)/.done)
	mkdir -p build
	$(WITH_COMPILED) $(BIN)/quicoll sim --seeds $(SEEDS) --json build/sweep.json

deep: $(VENV)/.dev
	QUICOLL_TEST_DEEP=1 $(BIN)/python -m pytest $(call PARALLEL,$(WAITING)) --timeout=0
	$(MAKE) sweep

# Both are run, whatever becomes of the first.
torch-suites:
	$(if $(SUITES),,$(error make torch-suites SUITES=the path of an environment with torch))
	mkdir -p build
	$(IN_SUITES) tests/torch_suite.py --json build/torch-suite.json; torch=$$?; \
	$(IN_SUITES) tests/torchft_suite.py --json build/torchft-suite.json && exit $$torch

IN_SUITES = PYTHONPATH='$(HERE):$(HERE)/transport' $(SUITES)/bin/python

# The page of commands is made anew first; tests/unit/test_site.py notices where somebody forgot to commit it.
docs: $(VENV)/.docs
	$(BIN)/python docs/commands_page.py
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees docs build/docs

# What a user installs is the wheel: a module, a py.typed, an entry point or a dependency that was forgotten shows only
# there. All runs from an empty directory and with -P, so that no import can find the source tree. Every module is
# imported, the command starts processes that train, torch knows the backend and pytest finds its plugin.
wheel: $(VENV)/.dev $(WHEEL_VENV)/.deps
	rm -rf build/wheel && mkdir -p build/wheel build/away
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . >/dev/null
	$(WHEEL_VENV)/bin/python -m pip install --quiet --no-deps --force-reinstall build/wheel/*.whl
	cd build/away && $(IN_WHEEL_VENV)/python -P -c "$$CHECK_INSTALLED"
	cd build/away && $(IN_WHEEL_VENV)/python -P -c "$$IMPORT_ALL" '$(HERE)'
	cd build/away && $(IN_WHEEL_VENV)/quicoll sim --seed 1 --ranks 2 --steps 2
	cd build/away && PYTHONSAFEPATH=1 $(IN_WHEEL_VENV)/quicoll run -n 2 '$(HERE)/examples/allreduce.py'
	cd build/away && $(IN_WHEEL_VENV)/python -P -c 'import torch.distributed as d; assert d.is_backend_available("quicoll")'
	cd build/away && echo "$$TEST_WITH_PLUGIN" >test_plugin.py && $(IN_WHEEL_VENV)/python -P -m pytest -q \
		-p no:cacheprovider --rootdir=. -c /dev/null --sim-seeds 3:5 test_plugin.py

# The wheel is built from the packed sources, so these are whole. It is the pure one, for every platform.
dist: $(VENV)/.dev $(TWINE_VENV)/.done
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(TWINE_VENV)/bin/python -m twine check --strict dist/*

# Of its own: keys, sessions and whatever else an upload needs have no business in the environment of the tests.
$(TWINE_VENV)/.done: constraints.txt
	rm -rf $(TWINE_VENV)
	$(PYTHON) -m venv $(TWINE_VENV)
	$(TWINE_VENV)/bin/python $(PIP_INSTALL) twine
	touch $@

IN_WHEEL_VENV = $(abspath $(WHEEL_VENV))/bin

# Both packages as a wheel has them, their hot modules compiled. Whatever changes in the source, all of it is made anew.
compiled: $(COMPILED)/.done

$(COMPILED)/.done: $(VENV)/.dev hatch_build.py $(shell find quicoll transport -name '*.py')
	rm -rf $(COMPILED) $(COMPILED)-wheel
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -m build --wheel --no-isolation --outdir $(COMPILED)-wheel . >/dev/null
	$(BIN)/python -m zipfile -e $(COMPILED)-wheel/*.whl $(COMPILED)
	touch $@

bench: $(VENV)/.dev
	set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf $(VENV) $(WHEEL_VENV) $(TWINE_VENV) build dist demo.json .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find quicoll transport tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quicoll needs Python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# Installed again only when a dependency may have changed: the install is editable, so a changed source is there at once.
# Built with the hatchling of constraints.txt (no build isolation), since pip's constraints do not reach isolated builds.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) hatchling editables
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation --editable '.[demo,dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation --editable '.[demo,dev,docs]'
	touch $@

# First without any extra: the library must be importable with neither torch nor typer, then with what the tests need.
$(WHEEL_VENV)/.deps: $(VENV)/.dev
	rm -rf $(WHEEL_VENV) build/wheel && mkdir -p build/wheel build/away
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . >/dev/null
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python $(PIP_INSTALL) build/wheel/*.whl
	cd build/away && $(abspath $(WHEEL_VENV))/bin/python -P -c "$$CHECK_INSTALLED"
	$(WHEEL_VENV)/bin/python $(PIP_INSTALL) "$$(echo build/wheel/*.whl)[bf16,demo,fsspec,postgresql,sim]" pytest
	touch $@

define CHECK_INSTALLED
import importlib.util, pathlib, sysconfig, quicoll, quicoll_transport
site = pathlib.Path(sysconfig.get_path("purelib")).resolve()
for name in ("quicoll", "quicoll_transport"):
    found = pathlib.Path(importlib.util.find_spec(name).origin).resolve()
    assert found.is_relative_to(site), f"{found} is not the installed one in {site}"
    assert (found.parent / "py.typed").is_file(), f"{name} was built without its py.typed"
endef
export CHECK_INSTALLED

# With all extras: every module of the source tree, from where the wheel was installed.
define IMPORT_ALL
import importlib, pathlib, sys
for package in ("quicoll", "transport/quicoll_transport"):
    root = pathlib.Path(sys.argv[1], package)
    for path in root.rglob("*.py"):
        importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"))
endef
export IMPORT_ALL

# The options and the parameter come from the plugin, which pytest has to find by its entry point.
define TEST_WITH_PLUGIN
import numpy as np
import quicoll.sim

@quicoll.sim.scenario(ranks=2, script=lambda sim: None)
async def test_of_a_user(job, sim):
    async with job.step():
        assert (await job.group.all_reduce(np.ones(2))).tolist() == [2.0, 2.0]
endef
export TEST_WITH_PLUGIN
