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
# leases, so that two cores have time for six.
PROCESSES ?= 6
# What make test-fast runs: the other directories need servers. Its tests wait more than they work.
FAST_TESTS = tests/unit tests/integration tests/stores tests/docs
FAST_PROCESSES ?= 4
# What make test-versions runs besides the newest Celery, which make test uses.
CELERY_VERSIONS ?= 5.5.3 5.6.3
# What make test-django runs: the oldest supported Django on this Python, others on the newest Python
# of this machine.
DJANGO_VERSIONS ?= 5.2 6.0 newest
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.12 ~/.pyenv/versions/3.1[23]*/bin/python3 \
    $(PYTHON); do "$$python" -c '' 2>/dev/null && { echo "$$python"; break; }; done)
DJANGO_TESTS = tests/django $(addprefix tests/stores/test_django_, contract.py protocol.py stores.py)
# What make test-matrix runs the acceptance tests with, besides the newest Celery on this Python.
MATRIX_VERSIONS ?= 3.11-5.5.3 3.11-5.6.3 3.12-5.7.0 3.13-5.5.3 3.13-5.7.0 3.14-5.7.0 3.11-5.5.3-oldest
OLDEST_PACKAGES = 'redis==5.3.*' 'SQLAlchemy==2.0.*' 'Django==5.2.*'
MATRIX_TESTS = tests/workers/test_matrix.py
# How long make test-loop keeps the store from replying, in seconds.
OUTAGE ?= 10
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
# How many tasks the largest test of make test-lanes has; make test has a few hundred.
LANES ?= 20000
# How many calls are merged in the largest test of make test-merge; make test merges some hundred.
MERGED ?= 10000
# How long make chaos breaks things, the seed of what it does, and a broker, lock store or fault if
# not all: make chaos MINUTES=2 SEED=7 STORE=postgresql FAULT="clock jumped"
MINUTES ?= 20
SEED ?=
BROKER ?=
STORE ?=
FAULT ?=
# How long make soak begins runs, and how many minutes each takes if not three: make soak HOURS=8
# MINUTES_EACH=10 STORE=redis FAULT=none
HOURS ?= 1
MINUTES_EACH ?=
# How many acts make prove plays on each store; make test plays a few thousand.
ACTS ?= 100000
# How many seeds make simulate tries; make test tries a few hundred. One alone: make simulate SEED=7
SEEDS ?= 10000
# Another release to play beside this one, callers and workers crossed: make chaos PREVIOUS=v1.0, or
# PREVIOUS=pinned for the one that tests/chaos/previous.py names.
PREVIOUS ?=

# By file or by server, in the order in which tests/conftest.py puts them.
DISTRIBUTED = -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(DISTRIBUTED)

.DEFAULT_GOAL := help
.PHONY: help demo example test all-tests test-fast test-versions test-django test-matrix matrix-docs test-loop test-many test-beats test-guard test-lanes test-merge test-start chaos soak prove simulate mutants bench bench-docs lint docs services

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

test-django: services $(DJANGO_VERSIONS:%=test-django-%) ## The tests of the Django integration, on each supported Django

test-django-%: .cache/django-%/.installed
	.cache/django-$*/bin/python -m pytest $(DISTRIBUTED) $(DJANGO_TESTS) $(ARGS)

test-matrix: services .venv/.installed-dev .cache/mysql/.installed ## Ends, redelivery and revoke with every broker, result backend, pool, store and version; writes docs/reference/compatibility.md
	rm -rf .cache/matrix
	CELERY_UNIQUE_MATRIX=all CELERY_UNIQUE_MATRIX_RESULTS=.cache/matrix/all.json \
	    $(PYTEST) $(MATRIX_TESTS) tests/stores/test_contract.py $(ARGS)
	$(MAKE) --no-print-directory $(MATRIX_VERSIONS:%=test-matrix-%) $(DJANGO_VERSIONS:%=test-matrix-django-%)
	$(MAKE) --no-print-directory matrix-docs

test-matrix-django-%: .cache/django-%/.installed
	CELERY_UNIQUE_MATRIX_RESULTS=.cache/matrix/django-$*.json \
	    .cache/django-$*/bin/python -m pytest $(DISTRIBUTED) $(DJANGO_TESTS) $(ARGS)

test-matrix-%: .cache/matrix-%/.installed
	CELERY_UNIQUE_MATRIX=redis,memory$(if $(findstring oldest,$*),$(comma)store-sqlite) \
	    CELERY_UNIQUE_MATRIX_RESULTS=.cache/matrix/$*.json \
	    .cache/matrix-$*/bin/python -m pytest $(DISTRIBUTED) $(MATRIX_TESTS) $(ARGS)

matrix-docs: .venv/.installed-dev ## Write docs/reference/compatibility.md from the latest make test-matrix; MIXED=--mixed from runs of several commits
	$(BIN)/python -m tests.compatibility.page $(MIXED)

test-loop: services .venv/.installed-dev ## The longest stall of an event loop during 1,000 awaited calls and an outage of the store
	CELERY_UNIQUE_OUTAGE_S=$(OUTAGE) $(BIN)/python -m pytest -s -q tests/integration/test_aio.py -k test_a_loop_goes_on $(ARGS)

test-many: services .venv/.installed-dev ## Ten thousand unique calls on Redis, 100,000 replaces of one key, and calls interrupted at thousands of points, in some minutes
	CELERY_UNIQUE_MANY=$(MANY) CELERY_UNIQUE_REPLACES=$(REPLACES) CELERY_UNIQUE_INTERRUPTS=$(INTERRUPTS) \
	    $(BIN)/python -m pytest tests/workers/canvas/test_many.py tests/workers/test_many_replaces.py \
	    tests/integration/test_interrupts.py $(ARGS)

test-beats: services .venv/.installed-dev ## Three beats of each kind, killed, stopped and with clocks apart: 300 ticks each, in about 45 minutes
	CELERY_UNIQUE_TICKS=$(TICKS) $(BIN)/python -m pytest tests/workers/test_beats.py $(ARGS)

test-guard: services .venv/.installed-dev ## A thousand plain late acknowledged tasks on Redis, RabbitMQ and SQS that deliver them twice: as plain Celery, and guarded
	CELERY_UNIQUE_GUARDED=$(GUARDED) $(BIN)/python -m pytest -s -q tests/workers/test_guard_on_brokers.py $(ARGS)

test-lanes: services .venv/.installed-dev ## Lanes: 20,000 tasks in 1,000 of them while workers and producers are killed and stopped; 50 killed holders; 50,000 parked calls
	CELERY_UNIQUE_LANES=$(LANES) $(BIN)/python -m pytest -s -q tests/workers/test_lanes.py $(ARGS)

test-start: services .venv/.installed-dev ## Type the pages of docs/start into empty directories: plain, FastAPI, Flask, Django 5.2 and the newest
	CELERY_UNIQUE_START=all CELERY_UNIQUE_NEWEST_PYTHON="$(NEWEST_PYTHON)" \
	    $(BIN)/python -m pytest tests/workers/test_first_steps.py $(ARGS)

test-merge: services .venv/.installed-dev ## Merged calls: 10,000 in ten seconds from eight processes, and again while 200 producers and workers are killed
	CELERY_UNIQUE_MERGED=$(MERGED) $(BIN)/python -m pytest -s -q tests/workers/test_merging_workers.py $(ARGS)

chaos: services .venv/.installed-dev ## Twenty minutes of kills, stops, restarts, cuts and broken stores; then what became of every call
	$(BIN)/python -m tests.chaos.run --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
	    $(if $(BROKER),--broker "$(BROKER)") $(if $(STORE),--store $(STORE)) \
	    $(if $(FAULT),--fault "$(FAULT)") \
	    $(if $(PREVIOUS),--previous $(filter-out pinned,$(PREVIOUS)))

soak: services .venv/.installed-dev ## Lost and duplicated calls per million, by fault and store, for HOURS; adds to docs/explanation/evidence.md
	$(BIN)/python -m tests.chaos.soak --hours $(HOURS) $(if $(MINUTES_EACH),--minutes $(MINUTES_EACH)) \
	    $(if $(SEED),--seed $(SEED)) $(if $(STORE),--store $(STORE)) $(if $(FAULT),--fault "$(FAULT)")

prove: services .venv/.installed-dev ## Every interleaving of the specification, 100,000 concurrent acts on each store, and a producer killed at every system call
	CELERY_UNIQUE_KILLS=0 CELERY_UNIQUE_PROVE=1 CELERY_UNIQUE_ACTS=$(ACTS) $(BIN)/python -m pytest -v \
	    -n 2 --dist worksteal tests/spec tests/workers/faults/test_killed_producers.py --timeout 1800 $(ARGS)

simulate: .venv/.installed-dev ## Real callers and workers on a simulated broker, store, clock and scheduler: make simulate SEEDS=10000; SEED=7 replays one
	$(BIN)/python -m spec.simulation.run $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

mutants: services .venv/.installed-dev ## Plant bugs one at a time, and see which check finds each: make mutants ARGS="lua sql"
	$(BIN)/python -m spec.mutants.run $(ARGS)

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

.cache/mysql/.installed: scripts/fetch-debian
	scripts/fetch-debian .cache/mysql mysql-server-core
	@touch $@

# PYTHON-CELERY, such as 3.13-5.7.0, or PYTHON-CELERY-oldest.
comma := ,
.PRECIOUS: .cache/matrix-%/.installed
.cache/matrix-%/.installed: pyproject.toml scripts/make-venv scripts/find-python
	@"$$(scripts/find-python $(firstword $(subst -, ,$*)))" -m venv --without-pip .cache/matrix-$*
	@PYTHON="$(PYTHON)" scripts/make-venv .cache/matrix-$* -e '.[test]' 'celery==$(word 2,$(subst -, ,$*))' \
	    $(if $(findstring oldest,$*),$(OLDEST_PACKAGES))
	@touch $@

.PRECIOUS: .cache/celery-%/.installed
.cache/celery-%/.installed: pyproject.toml scripts/make-venv
	@PYTHON="$(PYTHON)" scripts/make-venv .cache/celery-$* -e '.[test]' 'celery==$*' 'celery-batches>=0.10'
	@touch $@

# Django comes last, by itself: django-celery-beat, which the tests need, allows no newer one than 6.0.
.PRECIOUS: .cache/django-%/.installed
.cache/django-%/.installed: pyproject.toml scripts/make-venv
	@PYTHON="$(if $(filter 5.%,$*),$(PYTHON),$(NEWEST_PYTHON))" scripts/make-venv .cache/django-$* -e '.[test]' \
	    'Django>=5.2'
	@PYTHON="$(if $(filter 5.%,$*),$(PYTHON),$(NEWEST_PYTHON))" scripts/make-venv .cache/django-$* --no-deps -U \
	    'Django$(if $(filter newest,$*),>=5.2,==$*)'
	@touch $@
