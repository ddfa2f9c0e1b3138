#!/usr/bin/env bash
# Sourced by the other scripts: makes .venv with the package, the given extras and the pinned
# versions, or does nothing when that has been done. Usage: . scripts/venv.sh EXTRA…
make_venv() {
    local extras made versions python
    extras=$(IFS=,; echo "$*")
    # And the folder: what pip installs has its name written in it.
    versions=$({ pwd && cat pyproject.toml constraints.txt; } | sha256sum)
    if [ -e .venv ] && [ ! -e .venv/.made ]; then
        echo ".venv: not made by this script, which would install other versions into it;" \
            "move it away, or use another folder for it" >&2
        exit 2
    fi
    # `dev` holds all others.
    for made in "$extras" dev; do
        if [ "$(cat .venv/.made 2>/dev/null)" = "$made $versions" ]; then
            return
        fi
    done
    for python in python3 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            break
        fi
        python=
    done
    if [ -z "$python" ]; then
        echo "need Python 3.11 or newer on the PATH" >&2
        exit 2
    fi
    echo "installing into .venv (extras: $extras)"
    mkdir -p .venv
    echo unfinished > .venv/.made
    "$python" -m venv .venv
    # torch by itself first: then nothing that depends on it can choose another build.
    .venv/bin/pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
    echo "$extras $versions" > .venv/.made
}
make_venv "$@"
