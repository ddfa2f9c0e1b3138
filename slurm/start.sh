#!/usr/bin/env bash
# Handed to sbatch in place of a batch file whose #SBATCH lines it is not to read: runs its arguments.
# By --wrap that would be sh's to do, and dash drops the functions that bash exports, as `module` is.
exec "$@"
