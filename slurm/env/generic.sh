# Any Slurm cluster, CPU nodes included (ranks then use gloo). Give other options to sbatch:
# slurm/train.sbatch --nodes=4 --ntasks-per-node=16 CONFIG. For nodes of 8 GPUs see nvlink8.sh.
sbatch_options=(--time=01:00:00 --ntasks-per-node=4 --cpus-per-task=1)
srun_options=()
# Jobs may share nodes, so the folder's name holds the job's number.
node_disk=${MEGAFRONTIER_NODE_DISK:-${SLURM_TMPDIR:-/tmp}}/megafrontier-${SLURM_JOB_ID:-JOB}
container=(apptainer exec)
binds=("${node_disk%/*}")

enter() {
    # Slurm gives rank 0's address. The port must differ between jobs.
    default MASTER_PORT=$((20000 + ${SLURM_JOB_ID:-0} % 10000))
}
