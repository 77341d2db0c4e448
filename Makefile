# Every target sets up what it needs in .venv: a machine with Python (3.10 or later) and make is enough.
# PYTHON=...       the Python to make .venv with (default: the first suitable one on the path)
# TORCH_INDEX=...  where to fetch torch from; https://download.pytorch.org/whl/cpu has the small CPU build
# PYTEST_ARGS=...  arguments for pytest, such as "-k planner" or '-m "not slow"'
# JOBS=...         processes that test shares its files among, suites that test-all runs at a time (default: one a core)
# BENCH_ARGS=...   arguments for bench-gpu, such as "--part mlp,tiny"
# DEMO_ARGS=...    arguments for the demo, such as "--data ~/mnist"

VENV := .venv
BIN := $(VENV)/bin
# modules are compiled when they are imported, once: most of what is installed never is
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE # where it is set, each of the processes that tests start would compile all it imports
SANITIZER := compute-sanitizer
# one thread for the peers' libraries: their idle threads would spin against the worker team
ALONE := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MPLBACKEND=Agg
JOBS = $(shell $(BIN)/python -c "import os; print(os.cpu_count())")
KINDS := $(patsubst tests/kinds/test_%.py,whole-%,$(wildcard tests/kinds/test_*.py))
# a file's tests run in one process, files in their order (the first take longest); a test over its time ends its process for good
SHARED = -p no:benchmark --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
WHOLE := --whole --sampled # and not again what `make test` runs as it is
FOLDERS := whole-cuda whole-equations whole-edge
FILES := whole-targets whole-cells # which compile most: what a process has compiled stays in its memory
LONGEST := whole-others $(FOLDERS) $(FILES) whole-graphs whole-levels whole-races
SUITABLE := import sys, ensurepip; sys.exit(sys.version_info < (3, 10))

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-micropython prebuild whole-others whole-levels $(FOLDERS) $(FILES) $(KINDS) test-peers test-arm ptx test-gpu sanitize-gpu lint size format docs site dist bench bench-gpu bench-rows fuzz kill mutants clean

help: ## print the targets
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1 \2/p' Makefile | awk '{t=$$1; $$1=""; printf "  %-13s%s\n", t, $$0}'

demo: $(VENV)/.demo ## train a network on real scans: the plan, the training, the accuracy
	$(BIN)/calcvm demo $(DEMO_ARGS)

test: prebuild $(VENV)/.torch ## run every test, of long suites a sample (with PyTorch: numbers must agree)
	$(ALONE) $(BIN)/python -m pytest $(SHARED) $(PYTEST_ARGS)

# every CPU kernel goes into the cache, where the tests' processes find it
prebuild: $(VENV)/.dev
	$(BIN)/calcvm warm

# what each has printed comes at its end
test-all: prebuild $(VENV)/.torch ## run all of the suites of which `make test` has a sample, side by side; takes 116 to 148 minutes on 2 cores
	$(MAKE) --no-print-directory --output-sync=target --keep-going --jobs=$(JOBS) $(LONGEST) $(filter-out $(LONGEST),$(KINDS)) mutants kill fuzz

whole-others: $(VENV)/.torch
	$(ALONE) $(BIN)/python -m pytest $(WHOLE) --ignore=tests/kinds $(FOLDERS:whole-%=--ignore=tests/%) $(FILES:whole-%=--ignore=tests/test_%.py) $(PYTEST_ARGS)

$(FILES): whole-%: $(VENV)/.torch
	$(ALONE) $(BIN)/python -m pytest $(WHOLE) tests/test_$*.py $(PYTEST_ARGS)

$(FOLDERS): whole-%: $(VENV)/.torch
	$(ALONE) $(BIN)/python -m pytest $(WHOLE) tests/$* $(PYTEST_ARGS)

# what the machine has not is said to have not run
whole-levels: $(VENV)/.torch ## run what depends on arithmetic as on x86-64-v2, -v3 and -v4
	$(ALONE) $(BIN)/python -m tests.levels -- $(PYTEST_ARGS)

$(KINDS): whole-%: $(VENV)/.torch
	$(ALONE) $(BIN)/python -m pytest $(WHOLE) -rP tests/kinds/test_$*.py $(PYTEST_ARGS)

test-peers: $(VENV)/.torch ## run only the comparisons with other libraries
	$(ALONE) $(BIN)/python -m pytest -m peers $(PYTEST_ARGS)

test-arm: $(VENV)/.dev ## run tests on 64-bit Arm, and compare bits of x86 processors, in an emulator (Debian: qemu-user-static)
	$(BIN)/python -m tests.emulated x86
	$(BIN)/python -m tests.emulated arm $(PYTEST_ARGS)

test-micropython: $(VENV)/.dev ## build MicroPython's port to Unix with packs, and train in it (MICROPYTHON=FOLDER of its sources)
	@test -n "$(MICROPYTHON)" || { echo "give the folder of MicroPython's sources: make test-micropython MICROPYTHON=FOLDER"; exit 1; }
	MICROPYTHON=$(MICROPYTHON) $(BIN)/python -m pytest tests/edge/test_micropython.py $(PYTEST_ARGS)

ptx: $(VENV)/.dev ## compile every CUDA kernel of every dtype for every compute capability; needs no GPU
	$(BIN)/python -m pytest --whole tests/cuda/test_ptx.py $(PYTEST_ARGS)

test-gpu: $(VENV)/.dev ## run the tests of the CUDA device; fails where there is no GPU
	@$(BIN)/python -c "from calcvm.vm.run.cuda.driver import Driver; Driver.open()" # before the work of compiling
	$(BIN)/python -m tests.gpu.prebuild
	$(BIN)/python -m pytest --gpu -m gpu tests/gpu tests/cuda $(PYTEST_ARGS)

# all six, then fail if one did: each report is of use
sanitize-gpu: $(VENV)/.dev ## train under compute-sanitizer: no access out of bounds, no race
	@failed=0; for tool in memcheck racecheck; do for mode in grid graph fleet; do \
	    echo "compute-sanitizer --tool $$tool: $$mode"; \
	    CALCVM_CUDA_SIMULATOR=0 $(SANITIZER) --tool $$tool --error-exitcode 1 $(BIN)/python tests/gpu/sanitize.py $$mode || failed=1; \
	done; done; exit $$failed

lint: $(VENV)/.dev ## check style, format, words, the number of lines, and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/words.py
	$(BIN)/python tools/size.py --check
	$(BIN)/mypy

size: $(VENV)/.dev ## count the lines of code of each room
	$(BIN)/python tools/size.py

format: $(VENV)/.dev ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev ## write docs/operators.md from the operator table, docs/rooms.svg from the imports
	$(BIN)/python tools/operators.py
	$(BIN)/python tools/rooms.py

site: $(VENV)/.docs ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/.dist $(VENV)/.dev ## build what is published into dist/, with wheels that bring compiled code, and check it as the package index does
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python tools/wheels.py dist/*.whl
	$(BIN)/twine check --strict dist/*

bench: $(VENV)/.peers ## run the benchmarks against the peers and write bench/RESULTS.md
	$(BIN)/python -m bench all

bench-gpu: $(VENV)/.peers ## run the benchmarks of the CUDA device against the peers on the same GPU
	$(BIN)/python -m bench gpu $(BENCH_ARGS)

bench-rows: $(VENV)/.dev ## time every row of the operator table alone
	$(BIN)/python -m pytest bench/test_micro.py --benchmark-sort=name

fuzz: $(VENV)/.dev ## run 100 000 programs with altered words: none may touch a byte outside the heap
	$(BIN)/python tests/fuzz_programs.py --programs 100000

kill: $(VENV)/.dev ## kill 200 training processes, damage 1000 files: no model may be lost, no damage go unseen
	$(BIN)/python -m tests.store_faults --kills 200 --flips 1000

mutants: $(VENV)/.torch ## put defects in on purpose: the tests must find each
	$(ALONE) $(BIN)/python -m tests.mutants

clean: ## remove .venv and everything that was made (the JIT cache is the user's: see calcvm info)
	rm -rf $(VENV) build dist out site .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks src/calcvm.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- set-up, once for each set of extras
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10 python; do \
	    if $$python -c '$(SUITABLE)' 2>/dev/null; then $$python -m venv $(VENV) && exit 0; exit 1; fi; \
	done; \
	echo "no Python 3.10 or later with the venv module found: install one, or name it with PYTHON=..."; exit 1

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[docs]"
	@touch $@

$(VENV)/.dist: | $(BIN)/python
	$(PIP) build twine wheel
	@touch $@

$(VENV)/.torch: $(VENV)/.dev
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e ".[torch]"
	@touch $@

$(VENV)/.peers: $(VENV)/.torch
	$(PIP) -e ".[peers]"
	@touch $@
