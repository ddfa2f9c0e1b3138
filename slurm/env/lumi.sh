# LUMI-G: like a Frontier node without NVMe. The CPU masks bind GCD i to local rank i (7 of 8 cores,
# because the first core of each L3 region is reserved for the system).
sbatch_options=(
    --account=project_000000000
    --partition=standard-g
    --time=2-00:00:00
    --ntasks-per-node=8
    --cpus-per-task=7
    --gpus-per-node=8
    --exclusive
)
cores_of_gcd=(
    fe000000000000 fe00000000000000 fe0000 fe000000
    fe fe00 fe00000000 fe0000000000
)
srun_options=(--cpu-bind="mask_cpu:$(IFS=,; echo "${cores_of_gcd[*]}")")
node_disk=/tmp/${USER:-$(id -un)} # in memory, private to the job

enter() {
    module load CrayEnv PrgEnv-gnu craype-accel-amd-gfx90a rocm
    # Add aws-ofi-rccl here, which LUMI's users install themselves. Without it RCCL would use sockets
    # and be several times slower. Because the plugin is named here, RCCL fails instead.
    export NCCL_NET="AWS Libfabric"
    MASTER_ADDR=$(hostname -i | cut -d ' ' -f 1)
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-3442}
    export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
    export NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB
    export HSA_FORCE_FINE_GRAIN_PCIE=1
    export FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DISABLE_HOST_REGISTER=1
    export FI_CXI_DEFAULT_CQ_SIZE=131072
}
