#!/usr/bin/env bash
# The one test command. It installs what the tests need, checks style and types, and runs the tests.
#
#     bash scripts/test.sh                            every test, in five sessions side by side
#     bash scripts/test.sh --fast                     under 3 minutes: before each commit
#     bash scripts/test.sh --record                   every test; keep each file's seconds, which balance the sessions
#     bash scripts/test.sh tests/partition -k exact   anything else goes to pytest, in one session
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv dev
python=.venv/bin/python pytest=(.venv/bin/python -m pytest -rs)

install_slurm() { # for tests/slurm; without root pytest says which tests it left out
    local packages=(slurm-wlm munge iproute2)
    local install=(env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends)
    if type slurmctld munged ip >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
        return
    fi
    "${install[@]}" "${packages[@]}" >/dev/null 2>&1 ||
        { apt-get -qq update && "${install[@]}" "${packages[@]}" >/dev/null; } ||
        echo "cannot install ${packages[*]}: the tests of slurm/ are left out" >&2
}

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy

count=5 options=() # more sessions than cores, because the tests of whole runs mostly wait
case "${1-}" in
--fast) count=2 options=(-m fast) ;;
--record | "") install_slurm ;;
*)
    install_slurm
    exec "${pytest[@]}" "$@"
    ;;
esac
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -r "$logs"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ "${1-}" = --record ]; then
    export MEGAFRONTIER_TEST_SECONDS="$logs"
fi
sessions=()
while read -ra files; do
    "${pytest[@]}" "${options[@]}" "${files[@]}" >"$logs/${#sessions[@]}.log" 2>&1 &
    sessions+=($!)
done < <($python -m tests.tiers "$count")
code=0
for i in "${!sessions[@]}"; do
    wait "${sessions[i]}" || code=$?
    cat "$logs/$i.log"
done
if [ "${1-}" = --record ]; then
    $python -m tests.tiers --record "$logs"
fi
exit "$code"
