#!/usr/bin/env bash
# Pack a Python environment once. Jobs unpack it onto each node's own disk, from which a thousand
# ranks import in seconds: export MEGAFRONTIER_ENV_TAR=OUT, then submit as always.
#
#   slurm/pack_env.sh OUT.tar.gz [PREFIX]     PREFIX: venv or conda environment; default: the jobs'
#                                             own, MEGAFRONTIER_PREFIX or .venv
set -euo pipefail
home=$(CDPATH='' cd -- "$(dirname "$0")/.." && pwd)
out=${1:?need slurm/pack_env.sh OUT.tar.gz [PREFIX]}
prefix=${2:-${MEGAFRONTIER_PREFIX:-$home/.venv}}
# Written under another name first, so that OUT is never incomplete.
if [ -d "$prefix/conda-meta" ]; then
    conda-pack --quiet --prefix "$prefix" --output "$out.partial" --format tar.gz --force \
        --n-threads -1 --ignore-editable-packages # jobs pack megafrontier itself, from the repository
elif [ -e "$prefix/pyvenv.cfg" ]; then
    tar -I "$(command -v pigz || echo gzip)" -cf "$out.partial" -C "$prefix" .
else
    echo "megafrontier: $prefix: no venv and no conda environment, need one to pack" >&2
    exit 2
fi
mv -T "$out.partial" "$out"
echo "$out: $(du -h "$out" | cut -f 1), from $prefix"
