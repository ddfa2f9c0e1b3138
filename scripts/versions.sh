#!/usr/bin/env bash
# The fast tests with other versions of packages, each time in a virtual environment of its own.
#
#     bash scripts/versions.sh 2.10.0 2.13.0   torch, and the other packages of constraints.txt
#     bash scripts/versions.sh lowest          the lowest versions that pyproject.toml allows
#
# The environments lie in a temporary folder until their tests are done. VENVS=FOLDER keeps them there.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
if [ $# = 0 ]; then
    echo "versions.sh: none given, need versions of torch or lowest" >&2
    exit 2
fi
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
kept=${VENVS-}
python=$(find_python)

code=0
for version; do
    venv=${kept:-$folder}/$version
    versions=$folder/$version.txt
    log=$folder/$version.log
    if [ "$version" = lowest ]; then
        "$python" scripts/lowest.py >"$versions"
    else
        sed "s/^torch==.*/torch==$version/" constraints.txt >"$versions"
    fi
    if [ ! -e "$venv" ]; then
        install_into "$venv" dev,evaluate,mlflow "$versions"
    fi
    if ! "$venv/bin/python" -m pytest --tb=short -ra -m fast >"$log" 2>&1; then
        code=1
        cat "$log"
    fi
    echo "$version: $(tail -n 1 "$log")"
    if [ -z "$kept" ]; then
        rm -r "$venv"
    fi
done
exit "$code"
