# Nodes of 8 H100 or H200 SXM and at least 112 cores, with machine=nvlink8-cluster. Add the site's
# --account and --partition. The rest is as in generic.sh.
. "$home/slurm/env/generic.sh"
sbatch_options=(
    --time=24:00:00
    --exclusive
    --mem=0
    --gpus-per-node=8
    --ntasks-per-node=8
    --cpus-per-task=14
)
# Each rank must see all GPUs of its node, because NCCL accesses the other GPUs directly. By default
# Slurm alternates tasks between sockets, while GPUs 0 to 3 mostly belong to the first one.
srun_options=(--gpu-bind=none --distribution=block:block)
container=(apptainer exec --nv)
