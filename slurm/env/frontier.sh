# OLCF Frontier. Its sbatch options, the account included, are the #SBATCH lines of the batch files.
srun_options=(--gpus-per-task=1 --gpu-bind=closest)
node_disk=/mnt/bb/${USER:-$(id -un)} # NVMe, of nodes asked for with -C nvme; empty at each job's start
single_job_qos=debug
container=(apptainer exec --rocm)
binds=(/lustre/orion /ccs/proj /mnt/bb /opt/cray)

enter() {
    module load PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 craype-accel-amd-gfx90a miniforge3
    # On one node the network plugin does not initialise.
    runs_on_one_node || module load rccl-net-plugin # wants rocm before it
    # Otherwise the libraries of the default CPE would be found, which is another one.
    [ -z "${CRAY_LD_LIBRARY_PATH:-}" ] ||
        export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    MASTER_ADDR=$(hostname -i | cut -d ' ' -f 1)
    export MASTER_ADDR
    default MASTER_PORT=3442 \
        GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 \
        NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB HSA_FORCE_FINE_GRAIN_PCIE=1 \
        FI_MR_CACHE_MONITOR=kdreg2 FI_CXI_DISABLE_HOST_REGISTER=1 \
        FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=2048 \
        FI_CXI_RX_MATCH_MODE=hybrid FI_CXI_RDZV_PROTO=alt_read \
        FI_CXI_RDZV_EAGER_SIZE=0 FI_CXI_RDZV_THRESHOLD=0 FI_CXI_RDZV_GET_MIN=0
    # Compute nodes reach the internet only through OLCF's proxy (docs/frontier.md). Without it, look
    # up hub names in the cache at once, instead of after minutes of retries.
    [ -n "${https_proxy:-}" ] || default HF_HUB_OFFLINE=1
}
