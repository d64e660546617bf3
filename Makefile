# Every target works in a clean clone, with Python 3.11 or newer and make. Nothing has to be
# activated: what is needed is installed into .venv, again only after pyproject.toml has changed.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

# A suite that starts hundreds of Python processes compiles its sources once. (An empty value is
# as none.)
export PYTHONDONTWRITEBYTECODE =

# Extra arguments for pytest: make test-fast ARGS="-k policy"
ARGS ?=
# How many test processes run at once, each with servers of its own. Many tests wait for workers and
# leases, so that two cores have time for four.
PROCESSES ?= 4
# What make test-fast runs: the other directories need servers. Its tests wait more than they work.
FAST_TESTS = tests/unit tests/integration tests/stores tests/docs
FAST_PROCESSES ?= 4
# What make test-versions runs besides the newest Celery, which make test uses.
CELERY_VERSIONS ?= 5.5.3 5.6.3
# What make test-django runs: the oldest supported Django, and the newest that the newest Python
# of this machine allows.
DJANGO_VERSIONS ?= 5.2 newest
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.12 ~/.pyenv/versions/3.1[23]*/bin/python3 \
    $(PYTHON); do "$$python" -c '' 2>/dev/null && { echo "$$python"; break; }; done)
DJANGO_TESTS = tests/django $(addprefix tests/stores/test_django_, contract.py protocol.py stores.py)
# How many calls make test-many makes, and how often it replaces one key; make test does so a few
# hundred times.
MANY ?= 10000
REPLACES ?= 100000
# make test-many interrupts calls at every Nth point (all: at each, which takes some twenty minutes);
# make test does so once for each line.
INTERRUPTS ?= 5
# How many ticks of each kind of beat make test-beats waits for; make test waits for a few.
TICKS ?= 300
# How many guarded tasks of 4 s make test-guard runs on each broker; make test runs a few.
GUARDED ?= 1000
# How long make chaos breaks things, and the seed of what it does: make chaos MINUTES=2 SEED=7
MINUTES ?= 10
SEED ?=

# By file or by server, in the order in which tests/conftest.py puts them.
DISTRIBUTED = -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(DISTRIBUTED)

.DEFAULT_GOAL := help
.PHONY: help demo example test all-tests test-fast test-versions test-django test-many test-beats test-guard chaos prove bench bench-docs lint docs services

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed-demo ## See it work: a real worker, no server, in under a minute
	@$(BIN)/python demo/run.py

example: .venv/.installed-example ## A Django shop to press buttons in; ARGS=--help says more
	@$(BIN)/python example_project/run.py $(ARGS)

# Style and types are looked at while the tests begin, which leave half of a core idle then.
test: services .venv/.installed-dev ## Everything: lint and all tests, on real Redis, Valkey, RabbitMQ, PostgreSQL and MariaDB
	@$(MAKE) --no-print-directory --jobs 2 --keep-going lint all-tests

all-tests:
	$(PYTEST) $(ARGS)

test-fast: .venv/.installed-dev ## The tests that need no server, in about a minute
	CELERY_UNIQUE_EXAMPLES=20 $(BIN)/python -m pytest -n $(FAST_PROCESSES) --dist loadfile --no-loadscope-reorder \
	    -m "not server and not slow and not versions" $(FAST_TESTS) $(ARGS)

test-versions: services $(CELERY_VERSIONS:%=test-celery-%) ## The tests that depend on Celery's version, on the older ones

test-celery-%: .cache/celery-%/.installed
	.cache/celery-$*/bin/python -m pytest $(DISTRIBUTED) -m versions $(ARGS)

test-django: services $(DJANGO_VERSIONS:%=test-django-%) ## The tests of the Django integration, on the oldest and the newest Django

test-django-%: .cache/django-%/.installed
	.cache/django-$*/bin/python -m pytest $(DISTRIBUTED) $(DJANGO_TESTS) $(ARGS)

test-many: services .venv/.installed-dev ## Ten thousand unique calls on Redis, 100,000 replaces of one key, and calls interrupted at thousands of points, in some minutes
	CELERY_UNIQUE_MANY=$(MANY) CELERY_UNIQUE_REPLACES=$(REPLACES) CELERY_UNIQUE_INTERRUPTS=$(INTERRUPTS) \
	    $(BIN)/python -m pytest tests/workers/canvas/test_many.py tests/workers/test_many_replaces.py \
	    tests/integration/test_interrupts.py $(ARGS)

test-beats: services .venv/.installed-dev ## Three beats of each kind, killed, stopped and with clocks apart: 300 ticks each, in about 45 minutes
	CELERY_UNIQUE_TICKS=$(TICKS) $(BIN)/python -m pytest tests/workers/test_beats.py $(ARGS)

test-guard: services .venv/.installed-dev ## A thousand plain late acknowledged tasks on Redis, RabbitMQ and SQS that deliver them twice: as plain Celery, and guarded
	CELERY_UNIQUE_GUARDED=$(GUARDED) $(BIN)/python -m pytest -s -q tests/workers/test_guard_on_brokers.py $(ARGS)

chaos: services .venv/.installed-dev ## Ten minutes of kills, stops, restarts and cuts; then what became of every call
	$(BIN)/python -m tests.chaos.run --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

prove: services .venv/.installed-dev ## Every interleaving of the protocol's model, and a producer killed at every system call of a publish
	CELERY_UNIQUE_KILLS=0 $(BIN)/python -m pytest -s -v tests/stores/test_protocol.py \
	    tests/workers/faults/test_killed_producers.py --timeout 900 $(ARGS)

bench: services .cache/bench/.installed ## What uniqueness costs, beside plain Celery and others: make bench ARGS="--quick"
	.cache/bench/bin/python -m benchmarks $(ARGS)

bench-docs: .venv/.installed-dev ## Put the figures of the latest make bench into the documentation
	$(BIN)/python -m benchmarks.docs

lint: .venv/.installed-dev ## Style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.installed-dev ## Build the documentation into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

services: ## Install the servers that make test and make bench start, where they are missing
	@scripts/install-services

# The demo installs only what it needs; the full set comes on top of it, into the same .venv.
.venv/.installed-demo: pyproject.toml scripts/make-venv
	@PYTHON="$(PYTHON)" scripts/make-venv .venv -e '.[sql]'
	@touch $@

.venv/.installed-example: pyproject.toml example_project/requirements.txt scripts/make-venv
	@PYTHON="$(PYTHON)" scripts/make-venv .venv -e . -r example_project/requirements.txt
	@touch $@ .venv/.installed-demo

.venv/.installed-dev: pyproject.toml scripts/make-venv
	@PYTHON="$(PYTHON)" scripts/make-venv .venv -e '.[dev]'
	@touch $@ .venv/.installed-demo .venv/.installed-example

# What the benchmark compares with is installed nowhere else.
.cache/bench/.installed: pyproject.toml scripts/make-venv benchmarks/requirements.txt
	@PYTHON="$(PYTHON)" scripts/make-venv .cache/bench -r benchmarks/requirements.txt
	@touch $@

.PRECIOUS: .cache/celery-%/.installed
.cache/celery-%/.installed: pyproject.toml scripts/make-venv
	@PYTHON="$(PYTHON)" scripts/make-venv .cache/celery-$* -e '.[test]' 'celery==$*' 'celery-batches>=0.10'
	@touch $@

.cache/django-newest/.installed: pyproject.toml scripts/make-venv
	@PYTHON="$(NEWEST_PYTHON)" scripts/make-venv .cache/django-newest -U -e '.[test]' 'Django>=5.2'
	@touch $@

.PRECIOUS: .cache/django-%/.installed
.cache/django-%/.installed: pyproject.toml scripts/make-venv
	@PYTHON="$(PYTHON)" scripts/make-venv .cache/django-$* -e '.[test]' 'Django==$*'
	@touch $@
