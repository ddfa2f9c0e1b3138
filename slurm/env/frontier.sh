# OLCF Frontier. Its sbatch options, the account included, are the #SBATCH lines of the batch files.
srun_options=(--gpus-per-task=1 --gpu-bind=closest)
node_disk=/mnt/bb/${USER:-$(id -un)} # NVMe, of nodes asked for with -C nvme; empty at each job's start

enter() {
    module load PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 craype-accel-amd-gfx90a miniforge3
    module load rccl-net-plugin # wants rocm before it
    MASTER_ADDR=$(hostname -i | cut -d ' ' -f 1)
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-3442}
    export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
    export NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB
    # Compute nodes reach the internet only through OLCF's proxy (docs/frontier.md). Without it, look
    # up hub names in the cache at once, instead of after minutes of retries.
    [ -n "${https_proxy:-}" ] || export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
    export HSA_FORCE_FINE_GRAIN_PCIE=1
    export FI_MR_CACHE_MONITOR=kdreg2 FI_CXI_DISABLE_HOST_REGISTER=1
    export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=2048
    export FI_CXI_RX_MATCH_MODE=hybrid FI_CXI_RDZV_PROTO=alt_read
    export FI_CXI_RDZV_EAGER_SIZE=0 FI_CXI_RDZV_THRESHOLD=0 FI_CXI_RDZV_GET_MIN=0
}
