#!/usr/bin/env bash
# The one test command: installs what the tests need, checks style and types, runs every test.
# Arguments go to pytest: bash scripts/test.sh tests/partition -k exact
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh dev
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
