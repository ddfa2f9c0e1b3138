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
# LUMI's guide runs PyTorch from its images only. They have RCCL's network plugin. For a long run name
# one image, because the latest one changes. Without an image (MEGAFRONTIER_IMAGE=) let `enter` load
# aws-ofi-rccl, too.
image=${MEGAFRONTIER_IMAGE-/appl/local/laifs/containers/lumi-multitorch-latest.sif}
container=(singularity run)
binds=(/pfs /scratch /project /projappl /flash /appl)

enter() {
    if [ -n "$image" ]; then
        module load Local-LAIF lumi-aif-singularity-bindings
    else
        module load CrayEnv PrgEnv-gnu craype-accel-amd-gfx90a rocm
    fi
    # Without the plugin RCCL would use sockets and be several times slower. Because the plugin is
    # named here, RCCL fails instead. On one node the plugin does not initialise.
    runs_on_one_node || default NCCL_NET="AWS Libfabric"
    MASTER_ADDR=$(hostname -i | cut -d ' ' -f 1)
    export MASTER_ADDR
    default MASTER_PORT=3442 \
        GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 \
        NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB HSA_FORCE_FINE_GRAIN_PCIE=1 \
        FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DISABLE_HOST_REGISTER=1 \
        FI_CXI_DEFAULT_CQ_SIZE=131072
}
