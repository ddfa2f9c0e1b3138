# Any Slurm cluster, CPU nodes too (the ranks then talk through gloo). What differs from these comes
# as sbatch options: slurm/train.sbatch --nodes=4 --ntasks-per-node=16 CONFIG. For GPUs see
# docs/frontier.md: each rank takes its own of all that the node has (--gpu-bind=none), for NCCL
# reaches the others directly, which it may not where each task sees but one.
sbatch_options=(--time=01:00:00 --ntasks-per-node=4 --cpus-per-task=1)
srun_options=()
# Jobs may share nodes, so nothing may be found or left under another job's name.
node_disk=${MEGAFRONTIER_NODE_DISK:-${SLURM_TMPDIR:-/tmp}}/megafrontier-${SLURM_JOB_ID:-JOB}

enter() {
    # Rank 0's address is known from Slurm; this is a port of the job's own.
    export MASTER_PORT=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 10000))}
}
