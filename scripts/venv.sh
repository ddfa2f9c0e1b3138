#!/usr/bin/env bash
# Sourced by the other scripts, for its functions.

find_python() {
    local python
    for python in python3 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "need Python 3.11 or newer on the PATH" >&2
    exit 2
}

# install_into FOLDER EXTRAS CONSTRAINTS: an environment with the package and its extras, in the
# versions that the file of constraints names.
install_into() {
    local python pip=("$1/bin/pip" install --quiet --disable-pip-version-check)
    python=$(find_python)
    "$python" -m venv "$1"
    # torch by itself first: then nothing that depends on it can choose another build.
    "${pip[@]}" "$(grep '^torch==' "$3")"
    "${pip[@]}" -c "$3" -e ".[$2]"
}

# make_venv EXTRA…: .venv with the pinned versions, or nothing when that has been done.
make_venv() {
    local extras made versions
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
    find_python >/dev/null
    echo "installing into .venv (extras: $extras)"
    mkdir -p .venv
    echo unfinished > .venv/.made
    install_into .venv "$extras" constraints.txt
    echo "$extras $versions" > .venv/.made
}
