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

pytest=(.venv/bin/python -m pytest -rs)
if [ $# -gt 0 ]; then
    exec "${pytest[@]}" "$@"
fi
# Whole runs wait much of their time, and those on Slurm most of it: side by side with the others.
# A line here is one pytest session, in the order of its files; all of them take about as long.
beside=(
    "tests/training/test_[!l]*.py"
    "tests/slurm/test_life.py tests/partition/test_[abdef]*.py"
    "tests/training/test_l*.py tests/scripts tests/partition/test_c*.py"
    "tests/slurm/test_losses.py tests/partition/test_[hilop]*.py tests/model tests/checkpoint"
)
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -r "$logs"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
sessions=() ignored=()
for tests in "${beside[@]}"; do
    paths=($tests)
    ignored+=("${paths[@]/#/--ignore=}")
    "${pytest[@]}" "${paths[@]}" >"$logs/${#sessions[@]}" 2>&1 &
    sessions+=($!)
done
# In the background too, for bash delays its traps while it waits for a child in the foreground.
# At Ctrl-C it ends as the others do, without a summary.
"${pytest[@]}" "${ignored[@]}" &
code=0
wait $! || code=$?
for i in "${!beside[@]}"; do
    wait "${sessions[i]}" || code=$?
    cat "$logs/$i"
done
exit "$code"
