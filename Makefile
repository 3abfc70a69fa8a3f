# Needs python3 (3.11 or newer), make and the package registries; the targets make the rest.
#
# Each environment is made by tools/venv.py from one hashed lock, and only when its lock, its Python or the place of the
# checkout changed. There are several because none may hide what another lacks:
#   .venv          requirements/dev.txt    tests, linters, type checker
#   .venv-run      requirements/run.txt    what a user gets: a module that needs a developer's package fails in `make run`
#   .venv-bench    requirements/bench.txt  the package and what it is measured against
#   .venv-docs     requirements/docs.txt   the package and the site generator
#   .venv-3.12 …   requirements/dev.txt    the same tests on the other Pythons

PYTHON ?= python3
# Tests of processes mostly wait, but what they wait for has deadlines: one worker more than there are cores.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# More for pytest: make test ARGS="-k setsid -x"
ARGS ?=
AGENT ?=
PORT ?=

BIN := .venv/bin
# pyright asks the registry whether it is the newest. It is the locked one, and a check must not need the network.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Tests start the package in hundreds of processes. Without bytecode on disk each of them would compile it again: a
# second of CPU instead of half a one for a server, and three times as long to collect the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run tour test test-busy chromium shells typescript screenshots docs docs-cli blocking check check-deep bench soak prove explore chaos test-agents conformance test-pythons lock clean venv venv-run venv-bench venv-docs

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: venv-run ## the server with a scripted agent in it, with what a user's installation has and nothing more (PORT=4380)
	.venv-run/bin/python -m banksman.demo $(if $(PORT),--port $(PORT))

# AGENT=claude: a session with that agent instead of the tour, with your own settings and at your own cost.
tour: venv-run ## a guided tour in the terminal (AGENT=claude: a session with the real one)
	.venv-run/bin/python -m banksman.demo talk "$(AGENT)"

test: venv chromium shells ## the tests, in parallel, in five minutes; the slowest ten are printed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# A newcomer's machine is busy with other things. No test may fail because of that: see CONTRIBUTING.md.
test-busy: venv chromium shells ## `make test` once, with six busy loops beside it
	$(PYTHON) tools/busy.py $(MAKE) test

# Needed by the browser tests alone. Where there is none and none may be installed it says so, and CI stops here.
chromium:
	@$(PYTHON) tools/chromium.py > /dev/null
shells:
	@$(PYTHON) tools/debian.py zsh fish
# For the client that is generated from the OpenAPI. Needs the registry of npm once.
typescript: venv
	@$(BIN)/python tools/typescript.py > /dev/null

# The tutorial's pictures are made by the tests that follow it, so that they show what it does and not what it did once.
screenshots: venv chromium ## docs/images/*.png again, by the browser test of the tutorial
	BANKSMAN_SCREENSHOTS=docs/images $(BIN)/python -m pytest -n 0 -q -m thorough $(ARGS) tests/server/web/browser/test_tutorial_pictures.py

# No network: the theme fetches no font, and the strict mode makes a broken link or anchor an error.
docs: venv-docs ## the documentation site, in build/site
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir build/site

docs-cli: venv ## docs/cli.md, from what --help says
	$(BIN)/python tools/cli_page.py

blocking: venv ## the classes of banksman.threads again, from the async ones
	$(BIN)/python tools/blocking_api.py

check: venv ## format, lint, strict types, the layers' one-way rule
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/blocking_api.py --check
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_layers.py

bench: venv-bench ## ratios against subprocess, asyncio and claude-agent-sdk, from one run
	.venv-bench/bin/python -m bench

# Not part of `make bench`: it takes as long as it is told. bench/soak.py says how each number is judged.
MINUTES ?= 15
SVG ?= build/soak.svg
soak: venv-bench ## a server under load: does anything grow with its history? (MINUTES=15; plots in build/soak.svg)
	.venv-bench/bin/python -m bench.soak --minutes $(MINUTES) --svg $(SVG)

# What `make test` leaves out of these for its five minutes (tests/thorough.py): the slower worlds of the core, schedules of the
# driver, of the deaths, cuts and failures those that are like their neighbours, and what is marked thorough.
prove: venv chromium shells typescript ## every order of facts, every death of the store, every cut of a stream, every call that fails
	BANKSMAN_EXPLORE=160 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		-o faulthandler_timeout=900 -m "thorough or explored" $(ARGS)

# The same tests as `make test` runs, with more schedules each and larger worlds. Minutes to hours, as EXPLORE says.
EXPLORE ?= 2000
explore: venv ## slower proofs: more schedules of the driver (EXPLORE=2000 each), larger worlds of the core
	BANKSMAN_EXPLORE=$(EXPLORE) BANKSMAN_EXPLORE_LARGE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		-o faulthandler_timeout=7200 $(ARGS) tests/simulation/test_driver_explored.py tests/core/session/test_step.py

# The same storms as in `make test`, with another seed each time: one server for CHAOS minutes; three nodes of NATS, three
# hosts and two front ends with sixty sessions for CLUSTER minutes, then how long a take-over takes. A seed that failed is
# printed: BANKSMAN_CHAOS_SEED=… make chaos begins with it; ARGS="-k cluster" leaves the other one out.
CHAOS ?= 10
CLUSTER ?= 5
chaos: venv ## clients cut off, servers, hosts and nodes killed and stopped, again and again (CHAOS=10, CLUSTER=5 minutes)
	BANKSMAN_CHAOS=$(CHAOS) BANKSMAN_CHAOS_CLUSTER=$(CLUSTER) \
		$(BIN)/python -m pytest -n 0 -s -o faulthandler_timeout=7200 -m "thorough or not thorough" $(ARGS) tests/chaos

# What `make test` does for a moment, for DEEP seconds each, and from another beginning each time.
DEEP ?= 60
check-deep: venv ## made-up bytes at framing, dialects, streams and the server, and its whole API (DEEP=60 seconds each)
	BANKSMAN_DEEP=$(DEEP) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		-o faulthandler_timeout=7200 -o python_files="test_*.py deep_*.py" $(ARGS) tests/fuzz

# Not part of `make test`: they need npm once, Node.js and namespaces always. tools/agents.py says what it does and needs;
# what it fetches is kept in the user's cache, for all checkouts, and is not `clean`'s.
test-agents: venv ## the real agents against a fake model, in a namespace without a network; ends with a table
	$(PYTHON) tools/agents.py run $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) tests/agents

conformance: venv ## docs/conformance.md, from a run of every real agent in every step
	BANKSMAN_CONFORMANCE=docs/conformance.md $(PYTHON) tools/agents.py run $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) tests/agents/test_matrix.py

# Without what is explored in the core: it is pure, and the same on each. Of the server what speaks with it in earnest.
SERVED := $(addprefix tests/server/,http/test_accept_loop.py api/test_command_routes.py http/test_connection.py test_main.py streams/test_follower_marks.py api/test_session_routes.py)
test-pythons: ## the tests on each other Python from 3.11 to 3.13 that is found
	$(PYTHON) tools/pythons.py -n $(WORKERS) --dist worksteal $(ARGS) --ignore tests/core/session/test_step.py tests/core tests/process tests/commands tests/sessions tests/simulation tests/store tests/threads tests/testing $(SERVED)

# The locks name no registry: whoever installs uses their own, and the hashes hold whichever it is. The header of a lock
# says `make lock` and not the command, because the command could name one.
LOCK := .venv-lock/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes $(if $(UPGRADE),--upgrade) \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

lock: .venv-lock/bin/uv ## the hashed locks from requirements/*.in (UPGRADE=1: newest versions)
	$(LOCK) --output-file requirements/run.txt requirements/run.in
	$(LOCK) --output-file requirements/dev.txt requirements/dev.in
	$(LOCK) --output-file requirements/bench.txt requirements/bench.in
	$(LOCK) --output-file requirements/docs.txt requirements/docs.in
	@if grep -n '://' requirements/*.txt; then echo "a lock must name no address" >&2; exit 1; fi

.venv-lock/bin/uv:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet 'uv>=0.13,<0.14'

clean: ## remove everything that these targets made
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
