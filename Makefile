# `make demo` and `make test` only require Python 3.11+, make, Java 17 and etcd. As root on Debian, missing Java and etcd
# are installed. Without etcd, the etcd of a wheel is used.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AIRFLOW_VENV ?= .venv-airflow
AIRFLOW_CONSTRAINTS ?= constraints-airflow.txt
AIRFLOW_BIN := $(AIRFLOW_VENV)/bin
AIRFLOW_STAMP := $(AIRFLOW_VENV)/.installed
# Test processes. Tests of one file run in one process, because they share servers. tests/conftest.py orders the files.
WORKERS ?= 3
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests of words, names and pages. `make lint` runs them.
LINT_TESTS := tests/test_words.py tests/test_mirror.py tests/test_log_events.py tests/test_architecture_page.py tests/test_links.py
# Tests that kill the processes of each ingest source. `make test-ingest` kills thirty of each.
KILL_TESTS := tests/platform/ingest/test_engine_kill.py tests/platform/ingest/kafka/test_source_kill.py \
    tests/platform/ingest/postgres/test_source_kill.py tests/platform/ingest/gateway/test_gateway_kill.py \
    tests/platform/destinations/test_client_kill.py tests/consumers/tables/test_default_path_killed.py
DIST ?= dist
SEED ?= 1
# Tests whose results may depend on the interpreter: regular expressions, numbers, times, texts and their parsers.
INTERPRETER_TESTS := tests/test_patterns.py tests/platform/messages tests/platform/types tests/platform/specs \
    tests/platform/fragments tests/platform/test_names.py tests/platform/test_labels.py tests/broker/spool \
    tests/broker/http tests/broker/test_hostile_templates.py tests/consumers/comparison \
    tests/consumers/spark/decoding
# Tests start several hundred processes. Cached bytecode halves their start time.
unexport PYTHONDONTWRITEBYTECODE
export DAGSTER_DISABLE_TELEMETRY := 1
export DAGSTER_DG_UPDATE_CHECK_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help interpreter setup java etcd classes browser chromium mariadb demo ui airflow up test test-all test-shuffled test-near test-parsers test-pythons test-airflow test-airflow-oldest test-ingest test-install images check unit slow lint format types imports bench proto wrappers docs dist release-check clean

help: ## Show these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  %-12s %s\n", $$1, $$2}'

# The interpreter of an environment. Another PYTHON changes the file, and the environment is recreated.
%/.interpreter: interpreter
	@found=$$($(PYTHON) tools/pythons.py --identify) || exit 1; [ "$$found" = "$$(cat $@ 2>/dev/null)" ] || \
	    { mkdir -p $(@D) && echo "$$found" > $@; }

$(STAMP): pyproject.toml constraints.txt tools/setup.sh $(VENV)/.interpreter
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/setup.sh
	@touch $(STAMP)

setup: $(STAMP) java etcd classes ## Create .venv and install everything

# Every run checks for Java, so that a machine without it gets an error.
java:
	@sh tools/java.sh

etcd:
	@sh tools/etcd.sh

# Optional: it halves the start time of Spark sessions. Tests start about thirty sessions.
classes: $(STAMP) java
	@$(BIN)/python tools/class_archive.py || true

browser: $(STAMP) chromium

chromium:
	@sh tools/browser.sh

mariadb: $(STAMP)
	@sh tools/mariadb.sh

demo: setup ## Run the main job: cluster, flights, Spark consumer, Dagster, proof
	@$(BIN)/coranto demo run

ui: setup ## Open the demo's cluster in Dagster's UI
	@$(BIN)/coranto demo ui

$(AIRFLOW_STAMP): pyproject.toml $(AIRFLOW_CONSTRAINTS) tools/airflow.sh $(AIRFLOW_VENV)/.interpreter
	@PYTHON="$(PYTHON)" AIRFLOW_VENV="$(AIRFLOW_VENV)" AIRFLOW_CONSTRAINTS="$(AIRFLOW_CONSTRAINTS)" sh tools/airflow.sh
	@touch $(AIRFLOW_STAMP)

airflow: $(AIRFLOW_STAMP) java ## Open the demo's cluster in Airflow, in a separate environment
	@$(AIRFLOW_BIN)/python -m airflow_coranto.flights

up: setup ## Run an embedded cluster in the foreground
	@$(BIN)/coranto up

test: setup mariadb ## Lint, types, import rules, stubs, and all tests but the exhaustive ones
	@$(MAKE) --no-print-directory -j2 check
	@$(BIN)/python tools/run_tests.py $(SHARED) -m "not exhaustive" $(addprefix --ignore=,$(LINT_TESTS))

test-all: setup browser mariadb ## Lint, types, import rules, stubs, and all tests: before a release
	@$(MAKE) --no-print-directory -j2 check
	@$(BIN)/python tools/run_tests.py $(SHARED) --hypothesis-profile=exhaustive $(addprefix --ignore=,$(LINT_TESTS))

test-shuffled: setup mariadb ## The tests of `make test` in a random order (`make test-shuffled SEED=7`)
	@$(BIN)/python tools/run_tests.py $(SHARED) --shuffle=$(SEED) -m "not exhaustive" $(addprefix --ignore=,$(LINT_TESTS))

test-parsers: $(STAMP) java ## The tests that depend on the interpreter (`make test-parsers PYTHON=python3.12 VENV=.venv-3.12`)
	@$(BIN)/python tools/run_tests.py -n $(WORKERS) --dist loadfile -m "not integration" $(INTERPRETER_TESTS)

test-near: $(STAMP) ## The tests closest to a file (`make test-near FILE=platform/coranto/client/retry.py`)
	@$(BIN)/python tools/near_tests.py "$(FILE)"

test-pythons: ## The tests of test-parsers on each supported interpreter of this machine
	@$(PYTHON) tools/pythons.py

test-airflow: $(AIRFLOW_STAMP) java chromium ## Types and tests of the Airflow provider, in a separate environment
	@$(AIRFLOW_BIN)/mypy --follow-imports=silent -p airflow_coranto
	@$(AIRFLOW_BIN)/python -m pytest tests/orchestration/airflow

test-airflow-oldest: ## The same with the oldest supported Airflow
	@$(MAKE) --no-print-directory test-airflow AIRFLOW_VENV=.venv-airflow-oldest \
	    AIRFLOW_CONSTRAINTS=constraints-airflow-oldest.txt

test-ingest: setup ## Ingests from a real Kafka (downloaded by Maven), and dlt; thirty kills of each source (half an hour)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[kafka,dlt]' dagster-dlt
	@CORANTO_TEST_INGEST=1 $(BIN)/python -m pytest -m 'not exhaustive' $(addprefix --ignore=,$(KILL_TESTS)) \
	    tests/platform/ingest/kafka tests/platform/destinations
	@CORANTO_TEST_INGEST=1 CORANTO_INGEST_KILLS=30 $(BIN)/python -m pytest $(KILL_TESTS)

test-install: setup ## Wheel, extras on each Python of this machine, deployment files, backups, upgrades (half an hour)
	@CORANTO_TEST_INSTALL=1 $(BIN)/python -m pytest tests/installation

images: setup ## Build the images as root on Debian, and run the files of deploy/ in them (20 minutes)
	@PYTHON=$(BIN)/python sh deploy/images.sh --try

check: lint types imports ## All checks except tests

unit: setup ## Fast tests, without servers (a minute)
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "fast and not exhaustive" $(addprefix --ignore=,$(LINT_TESTS))

slow: setup ## Measure the tests without servers, and write the slow ones to tests/slow.txt (on a quiet machine)
	@$(BIN)/python -m pytest -q --record-slow -m "not integration and not system and not simulation and not browser and not exhaustive"

lint: $(STAMP) ## Ruff; checks of words, names, generated code, document links, and licenses of dependencies
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python tools/generate_proto.py --check
	@$(BIN)/python tools/generate_blocking.py --check
	@$(BIN)/python tools/check_links.py
	@$(BIN)/python tools/licenses.py --check
	@$(BIN)/python -m pytest -q $(LINT_TESTS)

format: $(STAMP) ## Fix and format with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP) ## mypy --strict on the packages
	@$(BIN)/mypy

imports: $(STAMP) ## Rules of imports between packages
	@$(BIN)/lint-imports

bench: setup ## Measure, print ratios and write benchmarks/results/*.json
	@$(BIN)/python -m benchmarks

proto: $(STAMP) ## Generate the protobuf and gRPC stubs
	@$(BIN)/python tools/generate_proto.py

wrappers: $(STAMP) ## Generate the blocking wrappers of asynchronous classes
	@$(BIN)/python tools/generate_blocking.py

docs: ## Build the documentation site into site/, in a separate environment
	@PYTHON="$(PYTHON)" sh tools/docs.sh

dist: $(STAMP) ## Build the wheel and the sdist into dist/
	@$(BIN)/python -m build --no-isolation --outdir $(DIST) .

release-check: $(STAMP) java ## Build and check wheel and sdist, check stated versions, install each extra (twenty minutes)
	@$(BIN)/python tools/release_check.py

clean: ## Remove the virtual environment, caches and the demo's data
	rm -rf $(VENV) $(AIRFLOW_VENV) .venv-* site .coranto .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
