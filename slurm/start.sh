#!/usr/bin/env bash
# Runs its arguments. Submitted instead of a batch file whose #SBATCH lines sbatch must not read.
# --wrap would use sh, and dash drops exported bash functions such as `module`.
exec "$@"
