# `make help` lists the targets. Each sets up what it needs and does so once.
SHELL := /bin/bash
.DEFAULT_GOAL := help
export PYTHON ?= python3
BIN := .venv/bin
PORT ?= 8888
BENCH ?=

.PHONY: help dev lab test lint bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

dev: ## make the environment in .venv, with everything built
	@.ci/setup dev
	@echo "Ready: 'make lab' starts JupyterLab, 'source .venv/bin/activate' enters the environment."

lab: ## start JupyterLab with a sample notebook (PORT=8888)
	@.ci/setup dev
	@.ci/lab $(PORT)

test: ## lint and run all the tests
	@.ci/setup test
	@.ci/test

lint: ## check style and types
	@.ci/setup lint
	@.ci/test lint

bench: ## measure against plain CRIU and print the ratios (BENCH="part --option ...")
	@.ci/setup test
	@.ci/setup-system bench
	@$(BIN)/python -m benchmarks $(BENCH)

clean: ## remove what was built, and the environment
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
	rm -rf jupyter_gpu_ckpt/bin jupyter_gpu_ckpt/labextension jupyter_gpu_ckpt/_version.py
	rm -rf labextension/node_modules labextension/lib labextension/.yarn labextension/coverage
	rm -f labextension/tsconfig.tsbuildinfo labextension/.eslintcache labextension/.stylelintcache
