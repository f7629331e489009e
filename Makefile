# Everything runs from .venv. The first target to need it creates it; the stamp keeps later runs from doing so again.
PYTHON ?= python3
GPU_PYTHON ?= $(PYTHON)
PYTEST_ARGS ?=
MARGINS_ARGS ?=
DEFAULTS_ARGS ?=
LENGTH_ARGS ?=
BYTES_ARGS ?= --jobs 4
CHECKPOINTS_ARGS ?=
SPARSE_ARGS ?=
DOCUMENTS_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.stamp
EXTRAS := demo,log,metrics,serve,cluster,doctor,export,oracle,dev
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTEST := $(BIN)/python -m pytest -q --no-header --tb=short --maxfail=20

.DEFAULT_GOAL := help
.PHONY: bench bench-checkpoints bench-data bench-decode bench-defaults bench-defaults-gpu bench-doctor bench-endless bench-serve bench-sparse bench-text bench-train bytes check clean coverage demo docs documents help ladder length needs-data record setup speed table test test-browser test-doctor test-fuzz test-gpu test-kills test-margins test-oracles test-sweep

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with every extra at the tested versions

# torch comes first and alone: pinned by the constraint, it is never replaced by a newer build some package admits.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "regard needs Python 3.11 or newer; choose one with: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11" >&2; exit 1; }
	@echo "Installing regard into .venv (once, a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP) ## train and use a small model in front of you
	$(BIN)/regard demo

# Two workers with one thread each: more threads than cores make both slower.
test: $(STAMP) ## the tests that CI runs (more options: PYTEST_ARGS=...)
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist worksteal -m "not gpu" --ignore=tests/oracles --ignore=tests/browser $(PYTEST_ARGS)

# Not part of `make test`: tracing takes 1.6 times as long with Python 3.11.
coverage: $(STAMP) ## the tests of `make test`, and which lines they never run
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist worksteal -m "not gpu" --ignore=tests/oracles --ignore=tests/browser --cov $(PYTEST_ARGS)

check: $(STAMP) ## format, lint, types, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/codespell

bench: $(STAMP) ## cost of composition against the same arithmetic by hand
	$(BIN)/python bench/overhead.py

bench-data: $(STAMP) ## what feeding a model costs, and that it grows no faster than the corpus
	OMP_NUM_THREADS=1 $(BIN)/python bench/data.py

bench-checkpoints: $(STAMP) ## what checkpoints in the background cost in training time (a CPU: about 25 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python bench/checkpointing.py $(CHECKPOINTS_ARGS)

bench-train: $(STAMP) ## training speed against the peers that are installed, small shape
	$(BIN)/regard bench train

bench-decode: $(STAMP) ## beam search against the peers that are installed, small shape
	$(BIN)/regard bench decode

speed: $(STAMP) ## every race on this device, for docs/results/speed.md (a CPU: about half an hour)
	$(BIN)/python docs/results/speed.py

# Not from .venv, which holds the CPU build of torch. Without matplotlib the picture is left out: run it again with --merge.
length: ## time, memory and recall by sequence length, for docs/results/length.md, with GPU_PYTHON (under 10 minutes)
	PYTHONPATH=src $(GPU_PYTHON) docs/results/length.py $(LENGTH_ARGS)

# Goes on where it was stopped. On a CPU, in two minutes: make documents DOCUMENTS_ARGS=--quick GPU_PYTHON=.venv/bin/python
documents: ## models of long documents by length, for docs/results/documents.md, with GPU_PYTHON (under 10 minutes)
	PYTHONPATH=src $(GPU_PYTHON) docs/results/documents.py $(DOCUMENTS_ARGS)

bench-endless: $(STAMP) ## generate a million tokens with a bounded memory (a CPU: about half an hour)
	$(BIN)/python bench/endless.py --tokens 1000000

bench-serve: $(STAMP) ## the server under load: throughput, full queue, SIGTERM, clients that leave (a few minutes)
	OMP_NUM_THREADS=1 $(BIN)/python bench/serving.py

# Prints in a table what a window, blocks, sinks and BigBird cost. More options: SPARSE_ARGS="--json sparse.json".
bench-sparse: ## sparse attention against full attention, and a training step of 65,536 tokens, with GPU_PYTHON (two minutes)
	PYTHONPATH=src $(GPU_PYTHON) bench/sparse_attention.py $(SPARSE_ARGS)

bench-text: ## regard train on real text (Europarl of REGARD_DATA) against Hugging Face, with GPU_PYTHON
	PYTHONPATH=src $(GPU_PYTHON) bench/text.py $(REGARD_DATA)/europarl-de-en/train.en.xz \
	  $(REGARD_DATA)/europarl-de-en/train.de.xz --tokens 0 32768

# Both need $REGARD_DATA (recipes/README.md). Fewer texts, other times: DEFAULTS_ARGS="--texts trec --time 1m 5m".
DEFAULTS = bench/defaults.py --prepare "$(REGARD_DATA)" --data runs/defaults/texts

needs-data:
	@test -n "$(REGARD_DATA)" || \
	  { echo "REGARD_DATA is not set; name the folder of the data sets (recipes/README.md): make $(MAKECMDGOALS) REGARD_DATA=..." >&2; exit 1; }

bench-defaults: needs-data $(STAMP) ## the defaults against what a user would write, 2 cores, for docs/results/defaults.md (over an hour)
	@$(PIP) install -c constraints.txt -e ".[bench]"
	$(BIN)/python $(DEFAULTS) --device cpu --threads 2 $(DEFAULTS_ARGS)
	$(BIN)/python bench/defaults.py --page

bench-defaults-gpu: needs-data ## the same on a GPU, with GPU_PYTHON (about half an hour)
	PYTHONPATH=src $(GPU_PYTHON) $(DEFAULTS) --device cuda $(DEFAULTS_ARGS)
	PYTHONPATH=src $(GPU_PYTHON) bench/defaults.py --page

docs: $(STAMP) ## regenerate the generated pages of docs/
	$(BIN)/python docs/generate.py

# The same tests with more kills than `make test` has time for.
test-kills: $(STAMP) ## kill a training 20 times at random moments, resume it, compare every bit; also of two ranks
	OMP_NUM_THREADS=1 REGARD_KILLS=20 $(PYTEST) tests/e2e/test_resume.py tests/e2e/test_parallel.py -k killed $(PYTEST_ARGS)

# The same test with more runs than `make test` has time for.
test-sweep: $(STAMP) ## 12 runs as jobs of submitit's local executor, two of which are killed: the same table
	OMP_NUM_THREADS=1 REGARD_SWEEP=1 $(PYTEST) tests/e2e/test_ablate.py -k interrupted_jobs $(PYTEST_ARGS)

# Another number, or the inputs of faults: make test-fuzz FUZZ_INPUTS=1000 FUZZ_ARGS="--keep faults".
FUZZ_INPUTS ?= 100000
test-fuzz: $(STAMP) ## damaged recipes, run folders and corpora for their readers: no traceback, no hang (15 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py --inputs $(FUZZ_INPUTS) $(FUZZ_ARGS)

# Precision and recall of the planted faults, then false alarms on Multi30k (if REGARD_DATA is set): bench/doctor.py.
test-doctor: $(STAMP) ## train models that degenerate for a known cause, with three seeds; the doctor must name the cause
	OMP_NUM_THREADS=1 REGARD_DOCTOR_SEEDS=3 $(PYTEST) tests/e2e/test_doctor.py -k degenerate $(PYTEST_ARGS)

bench-doctor: $(STAMP) ## precision and recall of the doctor on planted faults, and its findings on Multi30k of REGARD_DATA
	OMP_NUM_THREADS=1 $(BIN)/python bench/doctor.py faults
	@test -z "$(REGARD_DATA)" || OMP_NUM_THREADS=1 $(BIN)/python bench/doctor.py multi30k "$(REGARD_DATA)"

# On a machine with more cores: MARGINS_ARGS="--jobs 16".
test-margins: $(STAMP) ## how far what tests learn is from their thresholds, by instructions, threads and seeds
	$(BIN)/python bench/margins.py $(MARGINS_ARGS)

# cython first: fairseq builds in this environment, see requirements-oracles.txt. Old code warns; that is not our error.
# Triton has to know that it interprets when it is first imported, which may be by somebody else.
test-oracles: $(STAMP) ## compare with older reference toolkits (installs them)
	@$(PIP) install --no-deps cython
	@$(PIP) install --no-deps --no-build-isolation -r requirements-oracles.txt
	TRITON_INTERPRET=1 $(PYTEST) -W default -m oracle tests/oracles $(PYTEST_ARGS)

test-browser: $(STAMP) ## the lens in headless Chromium (two minutes)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { echo "the browser tests need chromium and its driver: apt-get install chromium chromium-driver" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(PYTEST) tests/browser $(PYTEST_ARGS)

# Needs $REGARD_DATA (recipes/README.md) and a GPU_PYTHON with a CUDA build of torch. Runs that are done are never
# repeated, so it may be stopped at any time.
table: ## train the 52 rows on Multi30k and write docs/results/table.md, with GPU_PYTHON (about an hour)
	PYTHONPATH=src $(GPU_PYTHON) -m regard ablate recipes/table.toml \
	  --source $(REGARD_DATA)/multi30k/tok/train.lc.norm.tok.en.gz --target $(REGARD_DATA)/multi30k/tok/train.lc.norm.tok.de.gz \
	  --valid-source $(REGARD_DATA)/multi30k/tok/val.lc.norm.tok.en.gz --valid-target $(REGARD_DATA)/multi30k/tok/val.lc.norm.tok.de.gz \
	  --rows table --seeds 3 --out runs/table
	$(GPU_PYTHON) docs/results/table.py runs/table

record: ## train the 60-second translator on Multi30k, three seeds, with GPU_PYTHON (docs/results/records)
	PYTHONPATH=src $(GPU_PYTHON) docs/results/records/record.py $(REGARD_DATA)/multi30k/tok

# Needs $REGARD_DATA, and goes on where it was stopped. GPU_PYTHON is a Python with a CUDA build of torch.
ladder: ## what the Transformer replaced, on Multi30k, for docs/results/ladder.md (a GPU; about 15 minutes on one)
	PYTHONPATH=src $(GPU_PYTHON) docs/results/ladder.py $(REGARD_DATA) --seconds 30 --search 300

# Needs $REGARD_DATA, and goes on where it was stopped. Another number of seeds: BYTES_ARGS="--jobs 4 --seeds 3".
bytes: needs-data ## film reviews as bytes: full, sparse and linear attention, for docs/results/bytes.md, with GPU_PYTHON
	PYTHONPATH=src $(GPU_PYTHON) docs/results/bytes.py $(REGARD_DATA) $(BYTES_ARGS)

# Not from .venv, which holds the CPU build of torch: GPU_PYTHON is a Python with a CUDA build, and pytest.
test-gpu: ## tests that need CUDA, with GPU_PYTHON
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -q --no-header --tb=short -m gpu $(PYTEST_ARGS)

clean: ## remove caches and build output; keeps .venv and runs/
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
