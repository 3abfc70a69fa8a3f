# Development tasks. Needs python3 (3.11 or newer), make and the package registries; the targets
# install everything else.
#
# tools/venv.py creates each environment from one hashed lock file. It does so again only if the
# lock, the Python or the path of the checkout has changed. The environments are separate, so that a
# package of one environment cannot hide a missing dependency of another:
#   .venv          requirements/dev.txt    tests, linters, type checker
#   .venv-run      requirements/run.txt    a user's installation: a module that imports a
#                                          development package fails in `make run`
#   .venv-bench    requirements/bench.txt  the package and the libraries of the comparison
#   .venv-docs     requirements/docs.txt   the package and the site generator
#   .venv-3.12 …   requirements/dev.txt    the same tests on the other Pythons

PYTHON ?= python3
# Process tests mostly wait, but with deadlines. So there is only one worker more than cores.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# More arguments for pytest: make test ARGS="-k setsid -x"
ARGS ?=
AGENT ?=
PORT ?=

BIN := .venv/bin
# pyright asks the registry for a newer version. The lock decides the version, and a check must not
# need the network.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Tests start the package in hundreds of processes. Without bytecode on disk each of them would
# compile the package again: a server start would take one second of CPU instead of half a second,
# and the collection of the tests three times as long.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run tour test test-busy chromium shells uml promtool caddy typescript screenshots docs docs-cli blocking check check-deep guard bench bench-plots soak prove explore chaos test-agents conformance test-pythons lock clean venv venv-run venv-bench venv-docs

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: venv-run ## Run the server with a scripted agent, in a user's environment (PORT=4380)
	.venv-run/bin/python -m banksman.demo $(if $(PORT),--port $(PORT))

# AGENT=claude opens a session with that agent instead of the tour, with your settings and at your
# cost.
tour: venv-run ## Show a guided tour in the terminal (AGENT=claude: a session with the real agent)
	.venv-run/bin/python -m banksman.demo talk "$(AGENT)"

# In a new checkout pytest rewrites the asserts of all modules. Two processes do that here, once.
# Without it, each worker would do all of it.
COLLECTED := .pytest_cache/collected
$(COLLECTED): | venv
	@for part in 'tests/[a-r]*/' 'tests/[s-z]*/'; do \
		$(BIN)/python -m pytest -n 0 -qq --collect-only $$part > /dev/null & done; wait
	@mkdir -p $(@D) && touch $@

test: venv chromium shells $(COLLECTED) ## Run the tests in parallel, in about five minutes; print the slowest ten
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# A contributor's machine may be busy. No test may fail because of that: see CONTRIBUTING.md.
test-busy: venv chromium shells ## Run `make test` once, beside six busy loops
	$(PYTHON) tools/busy.py $(MAKE) test

# Only the browser tests need Chromium. If it is missing and cannot be installed, the tool says so,
# and CI stops here.
chromium:
	@$(PYTHON) tools/chromium.py > /dev/null
shells:
	@$(PYTHON) tools/debian.py zsh fish bwrap ssh sshd
# A Linux kernel as an ordinary program, for limits that the kernel of this machine may not offer
# (cgroup v2 with its controllers), and for systemd as its first process.
uml:
	@$(PYTHON) tools/debian.py linux.uml systemd-run
# Checks the metrics, and the alert rules of deploy/. It is part of a large package.
promtool:
	@$(PYTHON) tools/debian.py promtool
# For the test of the guide to single sign-on.
caddy:
	@$(PYTHON) tools/debian.py caddy
# For the test of the TypeScript client that is generated from the OpenAPI document. Needs the npm
# registry once.
typescript: venv
	@$(BIN)/python tools/typescript.py > /dev/null

# The tests of the tutorial and of a restart make the pictures, so that these always show the current
# page.
screenshots: venv chromium ## Make docs/images/*.png again, by the browser tests that take them
	BANKSMAN_SCREENSHOTS=docs/images $(BIN)/python -m pytest -n 0 -q -m thorough $(ARGS) tests/server/web/browser/test_tutorial_pictures.py tests/server/web/browser/test_restart.py

# Needs no network: the theme loads no font. The strict mode makes a broken link or anchor an error.
docs: venv-docs ## Build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir build/site

docs-cli: venv ## Generate docs/cli.md from the --help texts, and the table of roles in docs/security.md
	$(BIN)/python tools/cli_page.py
	$(BIN)/python tools/role_table.py

blocking: venv ## Generate the classes of banksman.threads from the async ones
	$(BIN)/python tools/blocking_api.py

check: venv ## Check format, lint, strict types and the import rule of the layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/blocking_api.py --check
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_layers.py

guard: ## Build dist/banksman-guard.pyz: `banksman guard` as one file for a bare Python
	$(PYTHON) tools/guard_file.py

bench: venv-bench ## Measure ratios against subprocess, asyncio and claude-agent-sdk in one run
	.venv-bench/bin/python -m bench

bench-plots: venv-bench ## Draw the plots of docs/performance.md again, in about ten minutes
	.venv-bench/bin/python -m bench.plots

# Not part of `make bench`, because it takes MINUTES. bench/soak.py explains how each number is
# judged.
MINUTES ?= 15
SVG ?= build/soak.svg
soak: venv-bench ## Check that no resource of a loaded server grows with its history (MINUTES=15; plots in build/soak.svg)
	.venv-bench/bin/python -m bench.soak --minutes $(MINUTES) --svg $(SVG)

# The tests that `make test` leaves out to stay within five minutes (tests/thorough.py):
#  - the slower worlds of the core, and more schedules of the driver
#  - kills, cuts and failures that resemble a neighbouring case
#  - tests with the mark `thorough`
# Most of them wait for a deadline, a lease or a restart, and none may fail on a busy machine. So
# there are two workers per core.
PROVE_WORKERS ?= $(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN))
prove: venv chromium shells typescript uml promtool caddy ## Test every order of facts, kill of the store, cut of a stream and failing call
	BANKSMAN_EXPLORE=160 $(BIN)/python -m pytest -n $(PROVE_WORKERS) --dist worksteal \
		-o faulthandler_timeout=900 -m "thorough or explored" $(ARGS)

# The same tests as in `make test`, with more schedules each and larger worlds. Takes minutes to
# hours, depending on EXPLORE.
EXPLORE ?= 2000
explore: venv ## Explore more schedules of the driver (EXPLORE=2000 each) and larger worlds of the core
	BANKSMAN_EXPLORE=$(EXPLORE) BANKSMAN_EXPLORE_LARGE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		-o faulthandler_timeout=7200 $(ARGS) tests/simulation/test_driver_explored.py tests/core/session/test_step.py

# The same chaos tests as in `make test`, longer and with another seed each time:
#  - one server, for CHAOS minutes
#  - three NATS nodes, three hosts and two front ends with sixty sessions, for CLUSTER minutes; then
#    a measurement of the take-over time
# A failed run prints its seed: BANKSMAN_CHAOS_SEED=… make chaos begins with it. ARGS="-k cluster"
# runs only the second one.
CHAOS ?= 10
CLUSTER ?= 5
chaos: venv ## Cut clients off, kill and stop servers, hosts and nodes repeatedly (CHAOS=10, CLUSTER=5 minutes)
	BANKSMAN_CHAOS=$(CHAOS) BANKSMAN_CHAOS_CLUSTER=$(CLUSTER) \
		$(BIN)/python -m pytest -n 0 -s -o faulthandler_timeout=7200 -m "thorough or not thorough" $(ARGS) tests/chaos

# The fuzz tests of `make test`, for DEEP seconds each and with another seed each time.
DEEP ?= 60
check-deep: venv ## Fuzz framing, dialects, streams, the server and its whole API (DEEP=60 seconds each)
	BANKSMAN_DEEP=$(DEEP) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		-o faulthandler_timeout=7200 -o python_files="test_*.py deep_*.py" $(ARGS) tests/fuzz

# Not part of `make test`: these tests need npm once, and Node.js and namespaces always.
# tools/agents.py lists its steps and requirements. Its downloads stay in the user's cache, for all
# checkouts, and `make clean` does not remove them.
test-agents: venv ## Test the real agents against a fake model, in a namespace without a network; print a table
	$(PYTHON) tools/agents.py run $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) tests/agents

conformance: venv ## Generate docs/conformance.md from a run of every real agent in every step
	BANKSMAN_CONFORMANCE=docs/conformance.md $(PYTHON) tools/agents.py run $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) tests/agents/test_matrix.py

# Leaves out the exploration of the core, which is pure and behaves the same on each Python. Of the
# server tests it runs those that talk to a real server.
SERVED := $(addprefix tests/server/,http/test_accept_loop.py api/test_command_routes.py http/test_connection.py test_main.py streams/test_follower_marks.py api/test_session_routes.py)
test-pythons: ## Run the tests on each other installed Python from 3.11 to 3.13
	$(PYTHON) tools/pythons.py -n $(WORKERS) --dist worksteal $(ARGS) --ignore tests/core/session/test_step.py tests/asyncio tests/test_acp.py tests/core tests/process tests/guard tests/commands tests/sessions tests/simulation tests/store tests/threads tests/testing $(SERVED)

# The locks name no registry: each installation uses its configured one, and the hashes are valid
# for all. The header of a lock names `make lock` and not the uv command, because that could name a
# registry.
LOCK := .venv-lock/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes $(if $(UPGRADE),--upgrade) \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

lock: .venv-lock/bin/uv ## Generate the hashed locks from requirements/*.in (UPGRADE=1: newest versions)
	$(LOCK) --output-file requirements/run.txt requirements/run.in
	$(LOCK) --output-file requirements/dev.txt requirements/dev.in
	$(LOCK) --output-file requirements/bench.txt requirements/bench.in
	$(LOCK) --output-file requirements/docs.txt requirements/docs.in
	@if grep -n '://' requirements/*.txt; then echo "a lock must name no address" >&2; exit 1; fi

.venv-lock/bin/uv:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet 'uv>=0.13,<0.14'

clean: ## Remove everything that these targets created
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@$(PYTHON) tools/venv.py .venv requirements/dev.txt
venv-run:
	@$(PYTHON) tools/venv.py .venv-run requirements/run.txt
venv-bench:
	@$(PYTHON) tools/venv.py .venv-bench requirements/bench.txt
venv-docs:
	@$(PYTHON) tools/venv.py .venv-docs requirements/docs.txt
