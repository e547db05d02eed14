# `make help` lists the targets. On a machine with its own environment: make TARGET RUN=python3
PYTHON ?= python3
VENV := .venv
RUN ?= $(VENV)/bin/python
FSBENCH = $(RUN) -m fsbench
GATE = $(FSBENCH) compare --gate results/baseline results/raw/regress
ifeq ($(RUN),$(VENV)/bin/python)
READY = $(VENV)/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help env quickstart test lint test-gpu doctor regress clean \
        reproduce-table2 reproduce-table3 reproduce-memory reproduce-time-to-residual \
        reproduce-lowepsilon reproduce-hvp reproduce-divergence reproduce-forward reproduce-residuals \
        reproduce-ablation-fs2 reproduce-scaling-fs2 reproduce-limits-fs2 reproduce-dimension readme

help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | while IFS='|' read -r name text; do printf '  make %-26s %s\n' "$$name" "$$text"; done

env: $(READY) ## make the environment in .venv (2-3 minutes; the other targets do it when needed)

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name it: make env PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing: sudo apt-get install python3-venv"; exit 1; }
	@command -v g++ >/dev/null || echo "Note: no g++, so KeOps and GeomLoss multiscale will not run: sudo apt-get install g++ python3-dev"
	@echo "Making $(VENV): a few minutes, 2.7 GB with PyTorch for the CPU"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[baselines,dev]'
	@touch $@

quickstart: $(READY) ## every solver that runs here on the colours of two photographs; under 10 minutes on 2 cores
	$(FSBENCH) run experiment=quickstart

test: lint ## all tests that need no GPU, but few of formulas that third parties compile
	$(RUN) -m pytest -n 2 -m "not thorough" tests

lint: $(READY) ## style, types and import contracts
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(dir $(RUN))lint-imports

test-gpu: $(READY) ## all tests without exception, every solver on this machine's GPU too, one after the other
	$(RUN) -c 'import torch; assert torch.cuda.is_available(), "no CUDA device here: make test"'
	$(RUN) -m pytest tests

reproduce-table2: $(READY) ## memory traffic, time and launches at n = 10,000, d = 64 (smaller without a GPU)
	$(FSBENCH) run experiment=table2

reproduce-table3: $(READY) ## time against n and d, every solver: forward, and with the gradient
	$(FSBENCH) run experiment=table3_forward
	$(FSBENCH) run experiment=table3_backward

reproduce-forward: $(READY) ## time against the published package over n to 100,000 and d to 1024 (against KeOps without a GPU)
	$(FSBENCH) run experiment=forward

reproduce-memory: $(READY) ## peak memory against n and d
	$(FSBENCH) run experiment=memory

reproduce-time-to-residual: $(READY) ## time to residuals of 1e-2, 1e-3 and 1e-5 over dimension and eps, every dense solver
	$(FSBENCH) run experiment=time_to_residual

reproduce-residuals: $(READY) ## how many of 32 problems in 3-D each solver brings to 5e-3 in 120 s, up to 2^20 points (16 of 1,000 without a GPU)
	$(FSBENCH) run experiment=residuals

reproduce-ablation-fs2: $(READY) ## FlashSinkhorn2 without each of its parts, and the published method: time, passes, pairs kept
	$(FSBENCH) run experiment=ablation_fs2

reproduce-scaling-fs2: $(READY) ## FlashSinkhorn2's time, memory and passes over n, 2^17 to 2^24 (2^11 to 2^14 without a GPU)
	$(FSBENCH) run experiment=scaling_fs2

reproduce-limits-fs2: $(READY) ## what the published multiscale method fails on: 2^22 clustered points, 2,000 blurs a side, far away (small without a GPU)
	$(FSBENCH) run experiment=limits_fs2

reproduce-dimension: $(READY) ## FlashSinkhorn2 against the dense solver over d = 1 to 10: pairs kept, and who is faster
	$(FSBENCH) run experiment=dimension

reproduce-lowepsilon: $(READY) ## error and time as eps falls, at fixed iterations and to a residual
	$(FSBENCH) run experiment=lowepsilon

reproduce-hvp: $(READY) ## one Hessian-vector product at equal tolerance, time and error
	$(FSBENCH) run experiment=hvp

reproduce-divergence: $(READY) ## the value of a Sinkhorn divergence against the published package: time and error
	$(FSBENCH) run experiment=divergence

regress: $(READY) ## this GPU's speed against results/baseline, fails on a significant slowdown seen twice
	$(FSBENCH) run experiment=regress
	$(GATE) || { echo "measured once more: runs of one code differ by more than samples of one run"; \
	$(FSBENCH) run experiment=regress redo=true && $(GATE); }

readme: $(READY) ## refill the READMEs' tables and figures from results/published
	$(RUN) -m experiments.readme

doctor: $(READY) ## what is installed, which solvers run here and why the others do not
	$(FSBENCH) doctor

clean: ## remove unpublished records and caches
	rm -rf results/raw .pytest_cache .ruff_cache .mypy_cache .hypothesis
