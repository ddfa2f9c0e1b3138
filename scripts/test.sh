#!/usr/bin/env bash
# The one test command: installs what the tests need, checks style and types, runs every test.
# Arguments go to pytest, in one session: bash scripts/test.sh tests/partition -k exact
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh dev
# A real Slurm for tests/slurm, where it can be had; elsewhere pytest says which tests it left out.
if ! type slurmctld munged ip >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    packages=(slurm-wlm munge iproute2)
    install=(env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends)
    "${install[@]}" "${packages[@]}" >/dev/null 2>&1 ||
        { apt-get -qq update && "${install[@]}" "${packages[@]}" >/dev/null; } ||
        echo "no ${packages[*]} here: the tests of slurm/ are left out" >&2
fi
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy

run_tests() { .venv/bin/python -m pytest -rs "$@"; }

if [ $# -gt 0 ]; then
    run_tests "$@"
    exit
fi
# Whole runs wait much of their time, and those on Slurm most of it: side by side with the others.
beside=(tests/training tests/slurm/test_life.py tests/slurm/test_losses.py)
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -r "$logs"' EXIT
sessions=()
for tests in "${beside[@]}"; do
    run_tests "$tests" >"$logs/$(basename "$tests")" 2>&1 &
    sessions+=($!)
done
code=0
run_tests "${beside[@]/#/--ignore=}" || code=$?
for i in "${!beside[@]}"; do
    wait "${sessions[i]}" || code=$?
    cat "$logs/$(basename "${beside[i]}")"
done
exit "$code"
