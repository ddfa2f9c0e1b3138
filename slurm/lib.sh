# Sourced by the batch files: the cluster's own settings, submission, and steps inside a job.
# Wants $home, the repository.
#
#   MEGAFRONTIER_CLUSTER   which file of slurm/env/; default: frontier
#   MEGAFRONTIER_PREFIX    Python environment (venv or conda); default: .venv of the repository, or
#                          without a repository that of the command megafrontier
#   MEGAFRONTIER_IMAGE     container image that Python runs in: a .sif file or a folder (Apptainer), or
#                          a .sqsh file (pyxis, and enroot outside of steps). MEGAFRONTIER_PREFIX is then
#                          an environment on top of the image, or a squashfs file of one (Apptainer);
#                          default: the image's own Python
#   MEGAFRONTIER_ENV_TAR   what pack_env.sh made of it, to be unpacked onto every node's own disk
#   MEGAFRONTIER_UNPACK_SECONDS   after which a node that has not done so hangs; default: 1800
#   MEGAFRONTIER_CACHE_TAR   keeps what ranks compile for later jobs; default: compiled.tar in the run
#                          directory
#   MEGAFRONTIER_CACHE_MIB   its largest size; default: 1024
#   DRY_RUN=1              show what would be submitted and run, and do neither

fail() {
    echo "megafrontier: $*" >&2
    exit 2
}

# A message must not end the job: its output may be on a full disk.
say() { echo "$(date -u +%FT%TZ) job $SLURM_JOB_ID: $*" || true; }

warn() { echo "megafrontier: $*" >&2 || true; }

# Ask Slurm for up to 5 minutes, because slurmctld may be restarting. Sets `answer`.
patiently() {
    local try
    for try in {1..10}; do
        answer=$("$@") && return 0 # a bare `return` could return a trap's exit code
        sleep 30 || true
    done
    return 1
}

# Print each argument, quoted where bash needs it.
show() {
    local word
    for word; do
        [[ $word =~ ^[[:alnum:]_./:=,@+-]+$ ]] || word=${word@Q}
        printf '%s ' "$word"
    done
    echo
}

# A cluster's file sets: options that replace the #SBATCH lines below "Frontier", options of each
# srun, a folder on each node's own disk, and the function `enter` that a job calls. For containers:
# Apptainer's command and options, and folders that every container sees. And the queue (QOS) whose
# jobs must not be requeued or chained.
sbatch_options=()
srun_options=()
image=${MEGAFRONTIER_IMAGE:-}
container=(apptainer exec)
binds=()
single_job_qos=
placement=() # options of the srun that starts ranks: on which of the job's nodes
cluster=${MEGAFRONTIER_CLUSTER:-frontier}
if [ ! -e "$home/slurm/env/$cluster.sh" ]; then
    fail "MEGAFRONTIER_CLUSTER: $cluster, need the name of a file in slurm/env"
fi
. "$home/slurm/env/$cluster.sh"
prefix=${MEGAFRONTIER_PREFIX:-$home/.venv}
# Files that pip installed, or copies of them, have no .venv beside them: use the command's own.
if [ -z "${MEGAFRONTIER_PREFIX:-}" ] && [ ! -d "$home/megafrontier" ]; then
    prefix=$(command -v megafrontier) && prefix=${prefix%/bin/megafrontier} || prefix=$home/.venv
fi
[ -z "$image" ] || prefix=${MEGAFRONTIER_PREFIX:-}
package=$home            # the folder that ranks import megafrontier from
caches=$node_disk/caches # of what ranks compile
dry_run=${DRY_RUN:-}
[ "$dry_run" != 0 ] || dry_run=
certify= # whether to certify the layout before it is submitted
seconds=${MEGAFRONTIER_UNPACK_SECONDS:-1800}
# Start a command with the stop signal ignored, because the signal may arrive before a rank has
# installed its handler.
deaf=(sh -c 'trap "" USR1; exec "$@"' sh)

# default NAME=VALUE…: export the variables that neither the user nor a module has set.
default() {
    local pair
    for pair; do
        [ -v "${pair%%=*}" ] || export "$pair"
    done
}

# Print the names of variables whose values of the submission win over those of modules and of the
# cluster's file.
tuning_variables() {
    local family
    for family in NCCL_ RCCL_ FI_ GLOO_ HSA_ MIOPEN_ TORCHINDUCTOR_ TRITON_; do
        compgen -e "$family" || true
    done
}

# Whether the ranks run on one node, as far as this is known.
runs_on_one_node() { [ "${count:-${SLURM_JOB_NUM_NODES:-}}" = 1 ]; }

# is_single_job OPTION…: whether sbatch's options name a queue of single_job_qos.
is_single_job() {
    [ -n "$single_job_qos" ] &&
        [ "$(asked q qos ${SBATCH_QOS:+--qos="$SBATCH_QOS"} "$@")" = "$single_job_qos" ]
}

# Print the comment at the head of the batch file.
show_help() {
    sed -n '2,/^#SBATCH/ { /^#SBATCH/q; s/^# \{0,1\}//; p }' "$0"
    exit 0
}

# Split the words into leading `options` (of sbatch, --dry-run and --certify), a word each, and `arguments`.
# The value of a long option follows `=`, that of a short one may follow a blank.
split_options() {
    options=()
    while [[ ${1:-} == -* || ${1:-} == : ]]; do
        case $1 in
            :) fail "heterogeneous job (\`:\` between options): ranks run on its first part alone," \
                "need one part" ;;
            --dry-run) dry_run=1 ;;
            --certify) certify=1 ;;
            --help | -h) show_help ;;
            -[HIOQVWksuv]) options+=("$1") ;; # these take no value
            -?)
                options+=("$1${2:-}")
                [ $# = 1 ] || shift
                ;;
            *) options+=("$1") ;;
        esac
        shift
    done
    arguments=("$@")
    [ -z "${SLURM_JOB_ID:-}" ] || [ -n "$dry_run" ] || [ ${#options[@]} = 0 ] ||
        fail "${options[*]}: options of sbatch, but this runs in job $SLURM_JOB_ID; to submit another" \
            "job from here: env -u SLURM_JOB_ID $0 …"
    local folder
    folder=$(asked D chdir "${options[@]}")
    if [ -n "$folder" ]; then # relative paths of the config are looked up there
        CDPATH='' cd -- "$folder" || fail "--chdir: $folder, need a folder"
        options+=("--chdir=$PWD") # sbatch takes the last one
    fi
}

# asked LETTER NAME OPTION…: print the value of the last -LETTER or --NAME among sbatch's options.
asked() {
    local letter=$1 name=$2 option found=''
    shift 2
    for option; do
        case $option in
            --"$name"=*) found=${option#*=} ;;
            -"$letter"*) found=${option#-?} ;;
        esac
    done
    echo "$found"
}

# submit FILE OPTION… -- ARGUMENT…: submit a batch file. Sets `job` to the job's number.
submit() {
    local file=$1 own=() lines name variables=() command=(sbatch --parsable)
    if [ -z "$dry_run" ]; then # fail now, not after the wait in the queue
        need_archive
        need_python
    fi
    shift
    while [ "$1" != -- ]; do
        own+=("$1")
        shift
    done
    shift
    export MEGAFRONTIER_HOME=$home
    # Of the job that this may run in. The submitted one would take them for its own.
    unset SLURM_RESTART_COUNT "${!SLURM_ARRAY_@}"
    if [ ${#sbatch_options[@]} = 0 ]; then
        command+=("${own[@]}" "$file" "$@")
    else
        # Submit start.sh instead, because sbatch would read Frontier's #SBATCH lines, some of which
        # cannot be overridden. It also hands on our variables if the site exports none by default.
        mapfile -t lines < <(sed -n '/^# Frontier/q; s/^#SBATCH //p' "$file")
        for name in $(compgen -e MEGAFRONTIER_) $(tuning_variables); do
            variables+=("$name=${!name}")
        done
        command+=("${lines[@]}" "${sbatch_options[@]}" "${own[@]}")
        command+=("$home/slurm/start.sh" env "${variables[@]}" bash "$file" "$@")
    fi
    job=JOB
    if [ -n "$dry_run" ]; then
        show "${command[@]}"
    else
        job=$("${command[@]}")
        echo "Submitted batch job $job"
    fi
}

need_archive() {
    [ -z "${MEGAFRONTIER_ENV_TAR:-}" ] ||
        [[ -f $MEGAFRONTIER_ENV_TAR && -r $MEGAFRONTIER_ENV_TAR ]] ||
        fail "MEGAFRONTIER_ENV_TAR: $MEGAFRONTIER_ENV_TAR, need what slurm/pack_env.sh wrote"
}

need_python() {
    if [ -z "$image" ]; then
        [ -x "$prefix/bin/python" ] ||
            fail "MEGAFRONTIER_PREFIX: $prefix has no bin/python, need a Python environment"
    else # outside of it, links of an environment on top of the image may lead nowhere
        [ -e "$image" ] || fail "MEGAFRONTIER_IMAGE: $image, need the file of a container image"
        [ -z "$prefix" ] || [ -e "$prefix" ] ||
            fail "MEGAFRONTIER_PREFIX: $prefix, need an environment on top of $image"
        [[ $image != *.sqsh || ! -f $prefix ]] ||
            fail "MEGAFRONTIER_PREFIX: $prefix, need a folder, because pyxis mounts no squashfs file"
    fi
    use_python
}

# Set `python` and how to run it in the container, if there is one: the words `here` before it in this
# shell, which end with variables, and in a step options of srun, `container_options`, and the words
# `in_step`.
use_python() {
    local folder folders=() variables
    variables=(env PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}")
    python=$prefix/bin/python here=("${variables[@]}") container_options=() in_step=()
    [ -n "$image" ] || return 0
    [ -n "$prefix" ] || python=python3
    for folder in "$home" "$PWD" "$prefix" "${binds[@]}"; do
        # A login node has no node_disk.
        [ ! -d "$folder" ] || [[ " ${folders[*]} " == *" $folder:$folder "* ]] ||
            folders+=("$folder:$folder")
    done
    if [[ $image == *.sqsh ]]; then
        container_options=(--container-image="$image" --container-workdir="$PWD")
        container_options+=(--container-mounts="$(IFS=,; echo "${folders[*]}")")
        here=(enroot start "${folders[@]/#/--mount=}" "$image" env --chdir="$PWD"
            "${variables[@]:1}")
    else
        if [ -f "$prefix" ]; then
            folders+=("$prefix:/environment:image-src=/")
            python=/environment/bin/python
        fi
        in_step=("${container[@]}" --bind "$(IFS=,; echo "${folders[*]}")" "$image")
        here=("${in_step[@]}" "${variables[@]}")
    fi
}

# Set up the job's environment on all its nodes.
enter_job() {
    # With --export=NONE sbatch sets this so that srun, too, would export nothing.
    unset SLURM_EXPORT_ENV
    local name own=()
    for name in $(tuning_variables); do own+=("$name=${!name}"); done
    set +u # the site's `module` may read unset variables
    enter
    set -u
    [ ${#own[@]} = 0 ] || export "${own[@]}"
    # A shell that salloc started may run on a login node, where rank 0 does not run.
    if [ -z "$dry_run" ] && [ -z "${SLURMD_NODENAME:-}" ]; then
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
        export MASTER_ADDR
    fi
    if [ -n "${MEGAFRONTIER_ENV_TAR:-}" ]; then
        unpack_environment
    fi
    if [ -n "$dry_run" ] || [ -n "${MEGAFRONTIER_ENV_TAR:-}" ]; then
        use_python
    else
        need_python
    fi
    export PYTHONNOUSERSITE=1 # ignore a torch in ~/.local
    export PYTHONSAFEPATH=1   # do not import modules from the working directory
    [ -n "$image" ] || export PATH=$prefix/bin:$PATH
    export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    export MEGAFRONTIER_SNAPSHOT_DISK=$node_disk
    # On a shared file system, ranks would block each other on these caches, or corrupt them.
    default MIOPEN_USER_DB_PATH="$caches/miopen" MIOPEN_CUSTOM_CACHE_DIR="$caches/miopen" \
        TORCHINDUCTOR_CACHE_DIR="$caches/inductor" TRITON_CACHE_DIR="$caches/triton"
    unpack_caches
}

# The archive of the caches, or nothing if none is kept: only train has a run directory.
cache_archive() {
    echo "${MEGAFRONTIER_CACHE_TAR:-${directory:+$directory/compiled.tar}}"
}

# Give each node what earlier jobs have compiled. Without it ranks compile again, so a failure is only
# reported.
unpack_caches() {
    local archive seconds=120
    archive=$(cache_archive)
    [ -n "$archive" ] && [ -z "$dry_run" ] && [ -s "$archive" ] || return 0
    {
        each_node mkdir -p "$caches" &&
            timeout "$seconds" sbcast --force "$archive" "$caches.tar" &&
            each_node sh -c 'tar -xf "$0.tar" -C "$0"; rm -f "$0.tar"' "$caches"
    } || warn "warning: $archive cannot be unpacked on all nodes, which compile again"
}

# Keep what the first and the last node have compiled. They have the first and the last stage of a
# pipeline, and with these the kernels of all others.
keep_caches() {
    local archive mib last limit=${MEGAFRONTIER_CACHE_MIB:-1024}
    archive=$(cache_archive)
    [ -n "$archive" ] && [ -d "$caches" ] || return 0 # not there on a login node
    last=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
    if [ "$last" != "${SLURMD_NODENAME:-}" ]; then
        timeout --kill-after=5 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$last" \
            tar -cf - -C "$caches" . </dev/null 2>/dev/null |
            tar -xf - -C "$caches" --skip-old-files 2>/dev/null || true
    fi
    [ -n "$(find "$caches" -type f -newer "$archive" -print -quit 2>/dev/null || echo none)" ] || return 0
    mib=$(du -sm "$caches" | cut -f 1)
    if [ "$mib" -gt "$limit" ]; then # caches of old code, perhaps: the next job begins with none
        rm -f "$archive"
        say "compiled kernels have $mib MiB, more than MEGAFRONTIER_CACHE_MIB=$limit, and are not kept"
    else
        tar -cf "$archive.partial" -C "$caches" . && mv -T "$archive.partial" "$archive"
    fi
}

# Copy environment and package onto each node's own disk. On the shared storage a thousand ranks
# would wait for each file of them.
unpack_environment() {
    local target=$node_disk/environment source part
    [ -n "$dry_run" ] || need_archive
    # They may be left from an earlier start.
    try_each_node sh -c 'rm -rf "$0" && mkdir -p "$0"' "$target"
    broadcast "$MEGAFRONTIER_ENV_TAR" "$target.tar.gz"
    source=$(mktemp)
    local parts=()
    for part in megafrontier configs; do
        # Not there if pip installed these files. Then the environment has the package.
        [ ! -e "$home/$part" ] || parts+=("$part")
    done
    [ ${#parts[@]} -gt 0 ] || parts=(slurm)
    run tar -czf "$source" -C "$home" --exclude=__pycache__ "${parts[@]}"
    broadcast "$source" "$target/package.tar.gz"
    rm "$source"
    try_each_node sh -c 'tar -I "$(command -v pigz || echo gzip)" -xf "$0.tar.gz" -C "$0" &&
        tar -xzf "$0/package.tar.gz" -C "$0"' "$target"
    # conda-unpack replaces the old prefix in the packed files.
    try_each_node sh -c '[ ! -e "$0"/conda-unpack ] || "$0"/python "$0"/conda-unpack' "$target/bin"
    prefix=$target
    package=$target
}

# Run a command on each node. End the job if it fails, or does not answer, on any of them.
try_each_node() {
    local said failing
    if [ -n "$dry_run" ]; then
        each_node "$@"
        return
    fi
    unset SLURM_LABELIO # it would prefix the names
    # Each node prints a line first. If none does, srun has failed and not the command.
    said=$(each_node sh -c 'echo -; "$@" >&2 && echo "$SLURMD_NODENAME"' sh "$@") || true
    [ -n "$said" ] || give_up 70 "srun: no node answers"
    # A pipe, because the list of 9,362 nodes is too long for an argument.
    mapfile -t failing < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxFf <(echo "$said"))
    refuse_nodes "unpacking" "${failing[@]}"
}

# sbcast stops at the first nodes that fail and names them. If it names none, Slurm was busy.
broadcast() {
    local said failing code=0
    said=$(run timeout --foreground --kill-after=30 "$seconds" \
        sbcast --preserve --force "$@" 2>&1) || code=$?
    [ -z "$said" ] || echo "$said" || true
    [ "$code" != 0 ] || return 0
    mapfile -t failing < <(sed -n 's/.*REQUEST_FILE_BCAST(\([^)]*\)).*/\1/p' <<<"$said")
    refuse_nodes sbcast "${failing[@]}"
    give_up 70 "MEGAFRONTIER_ENV_TAR: sbcast of $1 fails"
}

# refuse_nodes ACTION NODE…: end the job, so that its next start excludes these nodes. If most nodes
# fail, the cause is not a bad node.
refuse_nodes() {
    local line="MEGAFRONTIER_ENV_TAR: $1 fails on $(($# - 1)) nodes: ${*:2:16}"
    shift
    [ $# -gt 0 ] || return 0
    if [ $((2 * $#)) -gt "$SLURM_JOB_NUM_NODES" ]; then
        leave_job
        fail "$line, need a whole archive, and room and leave to write in $node_disk"
    fi
    give_up 69 "$line" "$@"
}

# give_up CODE WHY NODE…: end a job that cannot use these nodes (69), or gets no answer from Slurm
# (70). train.sbatch replaces this.
give_up() {
    warn "$2"
    leave_job
    exit "$1"
}

# Slurm may have removed nodes from the job, and others may be lost, too.
leave_job() {
    local seconds=180 SLURM_JOB_NUM_NODES=${SLURM_JOB_NUM_NODES:-}
    local -x SLURM_NO_KILL=set
    if [ -n "${MEGAFRONTIER_ENV_TAR:-}" ] || [ -d "$caches" ]; then
        [[ ! ${answer:-} =~ \ NumNodes=([0-9]+)\  ]] || SLURM_JOB_NUM_NODES=${BASH_REMATCH[1]}
        each_node rm -rf "$node_disk/environment" "$node_disk/environment.tar.gz" "$caches" || true
    fi
    [ "${snapshots:-none}" = none ] || remove_snapshots
}

# The ranks of a job that was killed have left them (checkpoint.local), perhaps in the nodes' memory.
remove_snapshots() {
    local folders=("$snapshots") seconds=30 now
    now=$(scontrol --oneliner show job "$SLURM_JOB_ID") || true
    [[ ! $now =~ \ NumNodes=([0-9]+)\  ]] || SLURM_JOB_NUM_NODES=${BASH_REMATCH[1]}
    [ "$snapshots" != auto ] ||
        folders=(/dev/shm "$node_disk" ${SLURM_TMPDIR:+"$SLURM_TMPDIR"} ${TMPDIR:+"$TMPDIR"})
    each_node sh -c 'for folder; do rm -rf "$folder/megafrontier-$(id -u)/$SLURM_JOB_ID"-*; done' \
        sh "${folders[@]}" || true
}

# Run a command on each node. A failure does not end the others, and a hang is not waited for.
each_node() {
    run timeout --foreground --kill-after=30 "$seconds" \
        srun --overlap --nodes="${SLURM_JOB_NUM_NODES:-NODES}" --ntasks-per-node=1 \
        --ntasks="${SLURM_JOB_NUM_NODES:-NODES}" --kill-on-bad-exit=0 --wait="$seconds" \
        "${deaf[@]}" "$@"
}

run() {
    if [ -n "$dry_run" ]; then show "$@"; else "$@"; fi
}

# Set `step` to the command that starts all ranks. When the first rank has ended, the others have 11
# minutes (or SLURM_WAIT) to end, because they may wait 10 minutes for an absent rank and then name
# it. --kill-on-bad-exit would kill them at once: they could not name the lost rank, and srun's exit
# code would be that of its own kill.
make_step() {
    step=(srun "${placement[@]}" --kill-on-bad-exit=0 --wait="${SLURM_WAIT:-660}")
    # Slurm sets this only if cores were asked for. Otherwise the site's default applies.
    local cores=${SLURM_CPUS_PER_TASK:-${dry_run:+CORES}}
    step+=(${cores:+--cpus-per-task="$cores"})
    step+=("${srun_options[@]}" "${container_options[@]}")
    [ "$1" != train ] || step+=("${deaf[@]}") # evaluate has no handler: the signal ends it
    step+=("${in_step[@]}" "$python" -m megafrontier "$@")
}

# For --dry-run: print the variables that a job sets, then its commands.
show_job() {
    local before SLURM_JOB_NUM_NODES=${SLURM_JOB_NUM_NODES:-}
    [ -n "$SLURM_JOB_NUM_NODES" ] ||
        SLURM_JOB_NUM_NODES=$(asked N nodes "${sbatch_options[@]}" "${options[@]}")
    before=$(export -p)
    echo "# in the job, with slurm/env/$cluster.sh:"
    module() { show module "$@"; } # the real one exists only on the cluster
    enter_job
    comm -13 <(sort <<<"$before") <(export -p | sort) | sed 's/^declare -x /export /'
    make_step "$@"
    show "${step[@]}"
}
