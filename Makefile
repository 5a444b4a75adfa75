.PHONY: build
build:
	VIRTUAL_ENV=$(CURDIR)/.venv .venv/bin/maturin develop --uv --release
