# Everything a fresh machine needs: `make demo` to see it work, `make test` to check it.
# Commands are run as `.venv/bin/python -m …` and all paths are relative, so a space in the clone's path is fine.

PYTHON ?= python3
PY := .venv/bin/python
EXTRAS := [dev,cloud,formats,eval,float8,tune]
# Removed first and written last, so a set-up that was interrupted is made anew. The clone's path is in the
# name because a venv does not survive a move: its scripts, and the link to this source tree, are absolute.
HERE := $(shell pwd | cksum | cut -d ' ' -f 1)
INSTALLED := .venv/installed-$(HERE)
# What `make demo` needs: the package without its extras.
CORE := .venv/core-$(HERE)
# Whether .venv is a link of this work tree to the environment of another clone, which is not ours to empty or to fill.
BORROWED := $(if $(wildcard .venv/*-$(HERE)),,$(shell [ -L .venv ] && ls .venv/pyvenv.cfg 2>/dev/null))

# Shells and images that forbid Python to write bytecode would have every process compile all that it imports again:
# `import torch` takes 4.2 s of a core instead of 2.3 s, SkyPilot 8.1 instead of 3.1 s, TRL 29 instead of 12 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test test-all format lint docs clean

help:
	@echo "make demo     set up what it needs, then run the recipe 'smoke' through all stages (minutes, on a CPU)"
	@echo "make test     set up, then the tests of every promise that matters (minutes on two cores)"
	@echo "make test-all the same, and the slow tests: containers, the Slurm cloud, crashes of real processes"
	@echo "make format   ruff: format, and fix imports"
	@echo "make lint     ruff and mypy"
	@echo "make docs     write the generated tables of README.md and docs/ again"
	@echo "make install  set up .venv only;  PYTHON=python3.12 chooses the interpreter"
	@echo "make clean    remove .venv and caches; runs under .skytrain/ stay"

install: $(INSTALLED)
	@$(if $(filter install,$(MAKECMDGOALS)),echo "ready; now type:  source .venv/bin/activate && skytrain --help")

# Without --no-compile, pip compiles 29,000 files, 78 s of one core; an import compiles what a command needs.
# editable_mode=compat links the clone by a plain path entry. The default may use an import hook instead, which
# runs after the path search: there a folder of the same name in the working directory would win.
$(INSTALLED) $(CORE): pyproject.toml constraints.txt
	@[ -z "$(BORROWED)" ] || { \
	    echo "make: .venv links to that of another clone, $$(readlink .venv); remove the link for one of this clone" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || { \
	    echo "make: $(PYTHON) is not Python 3.11 or 3.12; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@[ -n "$(wildcard .venv/*-$(HERE))" ] || { echo "making .venv"; "$(PYTHON)" -m venv --clear .venv; }
	@rm -f "$@"
	"$(PY)" -m pip install --no-input --no-compile --disable-pip-version-check -c constraints.txt \
	    -e '.$(if $(findstring installed,$@),$(EXTRAS))' --config-settings editable_mode=compat
	@touch "$@"

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(CORE))
	.venv/bin/skytrain run smoke

# More workers than cores: the tests wait for servers and processes part of the time. All workers share one server of
# each kind (tests/conftest.py). OpenMP threads of several workers would wait for each other, so each has one.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest --dist worksteal

# `slow` leaves a test to `make test-all`: `.venv/bin/python -m pytest -m slow --collect-only -q` lists those tests.
test: install
	$(PYTEST) -n 4 -m "not slow"

test-all: install
	$(PYTEST) -n 4

# These run from the sources here, with any environment.
format lint docs: $(if $(BORROWED),,install)

format:
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The tables of README.md and docs/ that come from models and measurements.
docs:
	$(PY) -m benchmarks.documents

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find trainer pipelines tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
