# Everything a developer runs. Each target makes its environment first; a second run redoes nothing.
#
#   make test          install the pinned packages, then run the tests (less the slow ones)
#   make demo          fetch a small model, compile it, serve it and ask it a question; needs no GPU
#   make check         lint, and the structural tests: the quick look before a commit
#   make test-slow     every test
#   make test-clients  the tests with LiteLLM, LangChain and lm-eval, in an environment of their own
#   make golden        rewrite the golden files (read the diff!)
#   make docs          rewrite the generated pages of docs/
#   make bench         every benchmark on this machine's GPU, then the goals (BUDGET=3600 seconds)
#   make goals         the speed goals beside the latest figures; fails where one is missed

VENV := .venv
BIN := $(VENV)/bin
# The Python to make the environment with; empty means the first that fits, see below.
PYTHON ?=
# Test processes: the machine's cores, eight at most (each one imports torch).
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n : 8)))
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
# An environment knows its own path, so a moved or copied checkout makes a new one.
CLIENTS := $(VENV)-clients
STAMP := $(VENV)/installed-$(shell printf '%s' '$(CURDIR)' | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help env model test test-slow test-clients demo lint check golden docs bench goals clean

help:
	@sed -n 's/^#   //p' Makefile

env: $(STAMP)

$(STAMP): constraints.txt setup.cfg pyproject.toml .import/treadle/__init__.py
	@rm -rf $(VENV)
	@python=; for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "make: expected Python 3.11 or newer; tried: $(or $(PYTHON),python3 python3.13 python3.12 python3.11)." \
	    "Install one, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 3; fi; \
	echo "environment: $(VENV), by $$("$$python" --version), pinned by constraints.txt (a minute or two) ..."; \
	"$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt setuptools
	@$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[demo,test]'
	@touch $@

# The tests of real weights are skipped, and say so, where the model can't be fetched.
model: env
	-@$(BIN)/python cli.py demo --fetch-only --progress log

test: model
	$(PYTEST) -m 'not slow'

test-slow: model
	$(PYTEST)

# Seventy packages (900 MB) that no other test needs; all else they find in the first environment.
$(CLIENTS)/installed: $(STAMP)
	@rm -rf $(CLIENTS)
	@$(BIN)/python -m venv $(CLIENTS)
	@site='import site; print(site.getsitepackages()[0])'; \
	  $(BIN)/python -c "$$site" > "$$($(CLIENTS)/bin/python -c "$$site")/first-environment.pth"
	@echo "environment: $(CLIENTS), with the clients of setup.cfg (two minutes) ..."
	@$(CLIENTS)/bin/python -m pip install -qq -c constraints.txt --ignore-installed setuptools
	@$(CLIENTS)/bin/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[clients]'
	@touch $@

test-clients: $(CLIENTS)/installed
	$(CLIENTS)/bin/python -m pytest tests/server/test_clients.py

demo: env
	$(BIN)/treadle demo

lint: env
	@# All three run, so that one doesn't hide what the others find.
	@failed=0; for tool in 'ruff format --check .' 'ruff check .' 'mypy -p treadle'; do \
	  echo "$(BIN)/$$tool"; $(BIN)/$$tool || failed=1; done; exit $$failed

check: lint
	$(PYTEST) -m 'not slow' $(wildcard tests/test_*.py) tests/ir tests/models

golden: env
	$(PYTEST) --update-golden

docs: env
	$(BIN)/python docs/build_reference.py

BUDGET ?= 3600
bench: env
	$(BIN)/python bench/all.py --budget $(BUDGET)

goals: env
	$(BIN)/python bench/goals.py

clean:
	rm -rf $(VENV) $(CLIENTS) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
