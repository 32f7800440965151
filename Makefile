# Needs make, Python 3.10 or newer (`make PYTHON=python3.12 …` picks one) and, for torch.compile on
# a CPU, a C++ compiler. Each target sets up what it needs in .venv and repeats quickly.
# `make test ARGS="-k gelu"` passes arguments on.

# Bytecode is written when a module is first imported, not by pip for all there are: few are needed,
# but by many processes.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# mypy, import-linter and the docs look for fusion_backend.patterns where its name says. So they read
# the tree as it is installed.
TREE := build/tree

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types imports docs wheel smoke clean
.SECONDARY:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed-demo  ## fuse real models on this machine
	$(BIN)/fusedmlp demo $(ARGS)

test: $(VENV)/installed-test  ## run the tests, in two processes
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

# An empty -m selects what is marked slow, too.
test-all: $(VENV)/installed-test  ## run the tests with all their repetitions, before a release
	$(BIN)/pytest -n 2 --dist worksteal -m "" --cpp $(ARGS)

lint: $(VENV)/installed-dev  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev $(TREE)  ## check types, strictly
	cd $(TREE) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p fusion_backend

imports: $(VENV)/installed-dev $(TREE)  ## check which module may import which
	cd $(TREE) && PYTHONPATH=. $(abspath $(BIN))/lint-imports --no-cache $(CURDIR)/pyproject.toml

# Material for MkDocs advertises its successor on every run.
docs: $(VENV)/installed-docs $(TREE)  ## build the documentation's site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

wheel:  ## build the sdist and the wheel into dist/
	rm -rf dist build/env
	$(PYTHON) -m venv build/env
	build/env/bin/python -m pip install --disable-pip-version-check --quiet 'build>=1.2' 'setuptools>=77'
	build/env/bin/python -m build --no-isolation --outdir dist .

smoke: wheel  ## install the built wheel into a clean environment and let its doctor compile an MLP
	PYTHON=$(PYTHON) .ci/smoke dist/*.whl $(ENVIRONMENT)

clean:  ## remove everything that these targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: $(TREE)
$(TREE):
	@rm -rf $@ && mkdir -p $@/fusion_backend
	@ln -s $(CURDIR)/fusion_backend/* $@/fusion_backend/
	@ln -s $(CURDIR)/patterns $@/fusion_backend/patterns

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed; $(PYTHON) is older or missing: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

# Several requirements at once, such as installed-dev,docs, are one run of pip.
comma := ,
$(VENV)/installed-%: pyproject.toml | $(BIN)/python
	@echo "Installing fusedmlp with its $*-requirements into $(VENV) (PyTorch included: some minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile --editable '.[$*]'
	@touch $(addprefix $(VENV)/installed-,$(subst $(comma), ,$*))
