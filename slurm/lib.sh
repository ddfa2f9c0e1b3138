# Sourced by the batch files: the cluster's own settings, submission, and steps inside a job.
# Wants $home, the repository.
#
#   MEGAFRONTIER_CLUSTER   which file of slurm/env/; default: frontier
#   MEGAFRONTIER_PREFIX    Python environment (venv or conda); default: .venv of the repository
#   MEGAFRONTIER_ENV_TAR   what pack_env.sh made of it, to be unpacked onto every node's own disk
#   DRY_RUN=1              show what would be submitted and run, and do neither

fail() {
    echo "megafrontier: $*" >&2
    exit 2
}

# Ask Slurm until it answers, for some 5 minutes: slurmctld may have been started anew. The answer is
# in `answer`, and the loop in this shell, for a subshell would end at the first TERM.
patiently() {
    local pause
    for pause in {1..24}; do
        answer=$("$@") && return 0 # without the number a trap would give its own
        sleep "$pause" || true
    done
    return 1
}

# Each argument for any POSIX shell: bash's own %q may write $'…', which dash does not know.
show() {
    local word
    for word; do
        if [[ $word =~ ^[[:alnum:]_./:=,@+-]+$ ]]; then
            printf '%s ' "$word"
        else
            printf "'%s' " "${word//\'/\'\\\'\'}"
        fi
    done
    echo
}

# A cluster's file sets these: options in place of the #SBATCH lines below "Frontier", options of
# each srun, a folder that is each node's own, and the function `enter` that a job calls.
sbatch_options=()
srun_options=()
cluster=${MEGAFRONTIER_CLUSTER:-frontier}
if [ ! -e "$home/slurm/env/$cluster.sh" ]; then
    fail "MEGAFRONTIER_CLUSTER: $cluster, need the name of a file in slurm/env"
fi
. "$home/slurm/env/$cluster.sh"
prefix=${MEGAFRONTIER_PREFIX:-$home/.venv}
package=$home # the folder that ranks import megafrontier from
dry_run=${DRY_RUN:-}
is_asked_to_stop=

# Where the job will be, the config's paths are looked up, and its output's folder is made.
go_to() {
    [ -n "$1" ] && CDPATH='' cd -- "$1" 2>/dev/null || fail "--chdir: $1, need a folder"
    options+=("--chdir=$PWD")
}

# Takes leading options off the arguments: sbatch's, and --dry-run. The rest is in `arguments`.
split_options() {
    options=()
    while [[ ${1:-} == -* ]]; do
        case $1 in
            --dry-run) dry_run=1 ;;
            --test-only) fail "--test-only: makes what a job needs and no job, need --dry-run" ;;
            -[HIOQVWhksuv]) options+=("$1") ;;
            -a?*) options+=("--array=${1#-a}") ;;
            -a)
                options+=("--array=${2:-}")
                shift
                ;;
            --chdir=*) go_to "${1#*=}" ;;
            -D?*) go_to "${1#-D}" ;;
            --chdir | -D)
                go_to "${2:-}"
                shift
                ;;
            # The other short ones have a value, and of the long ones those that are common.
            -? | --nodes | --ntasks | --ntasks-per-node | --cpus-per-task | --time | --account | \
                --partition | --qos | --job-name | --output | --error | --array | --dependency | \
                --nodelist | --exclude | --constraint | --reservation | --begin | --mem | \
                --signal | --gres | --gpus | --gpus-per-node | --gpus-per-task | --mail-user | \
                --mail-type | --comment | --export | --licenses | --network | \
                --time-min | --tmp | --hint | --distribution | --prefer | --export-file | \
                --gpu-bind | --cpus-per-gpu | --mincpus | --priority | --core-spec | \
                --mem-per-cpu | --mem-per-gpu | --deadline | --switches | --wckey | --clusters)
                if [[ $1 == --* ]]; then options+=("$1=${2:-}"); else options+=("$1" "${2:-}"); fi
                shift
                ;;
            *) options+=("$1") ;;
        esac
        [ $# = 0 ] || shift
    done
    arguments=("$@")
    [ -z "${SLURM_JOB_ID:-}" ] || [ -n "$dry_run" ] || [ ${#options[@]} = 0 ] ||
        fail "${options[*]}: options of sbatch, in job $SLURM_JOB_ID; need them where that is asked" \
            "for, or to submit another job from here: env -u SLURM_JOB_ID $0 …"
}

# --nodes=N, where sbatch's options say how many.
asked_nodes() {
    local option open='' found=''
    for option; do
        option=$open$option open=''
        case $option in
            --nodes=*) found=${option#*=} ;;
            -N) open=-N ;;
            -N*) found=${option#-N} ;;
        esac
    done
    if [[ $found =~ ^[0-9]+$ ]]; then
        echo "--nodes=$found"
    else
        echo "warning: --nodes: ${found:-not given}, so nothing is checked for them; need a number" >&2
    fi
}

# --tasks-per-node=N, where the batch file, the cluster or sbatch's options say how many.
asked_tasks() {
    local option found=''
    if [ ${#sbatch_options[@]} = 0 ]; then
        found=$(sed -n 's/^#SBATCH --ntasks-per-node=//p' "$home/slurm/train.sbatch")
    fi
    for option in "${sbatch_options[@]}" "$@"; do
        [[ $option != --ntasks-per-node=* ]] || found=${option#*=}
    done
    [[ ! $found =~ ^[0-9]+$ ]] || echo "--tasks-per-node=$found"
}

# Whether a job with these options of sbatch gets all of the caller's variables.
gets_all_variables() {
    local option list=${SBATCH_EXPORT:-ALL}
    for option; do [[ $option != --export=* ]] || list=${option#*=}; done
    [[ ,${list^^}, == *,ALL,* ]]
}

# submit FILE OPTION… -- ARGUMENT…: hand a batch file to Slurm. Leaves the job's number in `job`.
submit() {
    local file=$1 own=() kept=() lines name until='' command code=0
    shift
    while [ "$1" != -- ]; do
        own+=("$1")
        shift
    done
    shift
    export MEGAFRONTIER_HOME=$home
    command=(sbatch --parsable)
    if ! gets_all_variables "${own[@]}"; then
        for name in $(compgen -e MEGAFRONTIER_); do kept+=("$name=${!name}"); done
    fi
    if [ ${#sbatch_options[@]} = 0 ] && [ ${#kept[@]} = 0 ]; then
        command+=("${own[@]}" "$file" "$@")
    else
        # Wrapped, for sbatch to read none of another cluster's lines, of which some cannot be taken
        # back, and for a job without the caller's environment to know what it is to use.
        [ ${#sbatch_options[@]} = 0 ] || until='/^# Frontier/q;'
        mapfile -t lines < <(sed -n "$until s/^#SBATCH //p" "$file")
        command+=("${lines[@]}" "${sbatch_options[@]}" "${own[@]}")
        command+=(--wrap "exec $(show env "${kept[@]}" bash "$file" "$@")")
    fi
    job=JOB
    if [ -n "$dry_run" ]; then
        show "${command[@]}"
    else
        job=$("${command[@]}") || code=$? # with --wait the job's own
        job=${job%%;*} # JOB;CLUSTER where there are several
        [ -z "$job" ] || echo "Submitted batch job $job"
    fi
    return "$code"
}

# The environment of a job on all its nodes.
enter_job() {
    # Until a step runs, which then is told. Without this the signal would end the job.
    trap 'is_asked_to_stop=1' USR1
    # With --export=NONE sbatch has srun, too, hand on nothing of what follows.
    unset SLURM_EXPORT_ENV
    enter
    if is_on_a_login_node; then # where no rank is
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
        export MASTER_ADDR
    fi
    if [ -n "${MEGAFRONTIER_ENV_TAR:-}" ]; then
        [ -n "$dry_run" ] || [ -r "$MEGAFRONTIER_ENV_TAR" ] ||
            fail "MEGAFRONTIER_ENV_TAR: $MEGAFRONTIER_ENV_TAR, need what slurm/pack_env.sh wrote"
        unpack_environment
    fi
    [ -n "$dry_run" ] || [ -x "$(here)/bin/python" ] ||
        fail "MEGAFRONTIER_PREFIX: $prefix has no bin/python, need a Python environment"
    export PYTHONNOUSERSITE=1 # a torch in ~/.local would come before a conda environment's own
    export PATH=$prefix/bin:$PATH
    export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # Caches on the shared file system are locked by all ranks at once, or torn.
    export MIOPEN_USER_DB_PATH=$node_disk/miopen MIOPEN_CUSTOM_CACHE_DIR=$node_disk/miopen
    export TORCHINDUCTOR_CACHE_DIR=$node_disk/inductor TRITON_CACHE_DIR=$node_disk/triton
}

unpack_environment() {
    local target=$node_disk/environment source
    try_each_node mkdir -p "$target"
    unpack "$MEGAFRONTIER_ENV_TAR" "$node_disk/environment.tar.gz" "$target"
    # What conda-pack packed has its old place written in many files.
    try_each_node sh -c '[ ! -e "$0"/conda-unpack ] || "$0"/python "$0"/conda-unpack' "$target/bin"
    prefix=$target
    # The package as it is now, or each rank would open its hundred files on the shared storage.
    source=$(mktemp)
    run tar -czf "$source" -C "$home" --exclude=__pycache__ megafrontier configs
    unpack "$source" "$target/package.tar.gz" "$target"
    rm "$source"
    package=$target
    export PYTHONSAFEPATH=1 # or Python would take it from the folder that the job is in
}

# As what salloc starts may be.
is_on_a_login_node() { [ -z "$dry_run" ] && [ -z "${SLURMD_NODENAME:-}" ]; }

# The environment that this script can use: what is packed is unpacked on the job's nodes alone.
here() {
    if is_on_a_login_node; then echo "${MEGAFRONTIER_PREFIX:-$home/.venv}"; else echo "$prefix"; fi
}

# unpack ARCHIVE COPY FOLDER: on every node.
unpack() {
    broadcast "$1" "$2"
    try_each_node tar -xzf "$2" -C "$3"
}

# Like each_node; ends the job when nodes fail, or do not say that it went well.
try_each_node() {
    local well failing
    if [ -n "$dry_run" ]; then
        each_node "$@"
        return
    fi
    patiently hear_each_node "$@" || start_again "srun: no node answers"
    well=$answer
    # Not as an argument: of 9,362 nodes it would be too long.
    mapfile -t failing < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxFf <(printf '%s\n' "$well"))
    refuse_nodes "$1" "${failing[@]}"
}

# The nodes on which a command goes well. Each says a line before: without one srun has failed.
hear_each_node() {
    local said
    said=$(each_node sh -c 'echo -; "$@" >&2 && echo "$SLURMD_NODENAME"' sh "$@") || true
    [ -n "$said" ] && echo "$said"
}

# sbcast stops at the first nodes that fail, and names them. Where it names none Slurm was busy.
broadcast() {
    local said failing try
    for try in 1 2 3; do
        if said=$(run sbcast --preserve --force "$@" 2>&1); then
            [ -z "$said" ] || echo "$said"
            return
        fi
        echo "$said" >&2
        mapfile -t failing < <(sed -n 's/.*REQUEST_FILE_BCAST(\([^)]*\)).*/\1/p' <<<"$said")
        refuse_nodes sbcast "${failing[@]}"
        [ "$try" = 3 ] || sleep 10
    done
    start_again "MEGAFRONTIER_ENV_TAR: sbcast of $1 fails"
}

# refuse_nodes COMMAND NODE…: end the job, for another to do without these nodes. What most of them
# fail is no matter of nodes.
refuse_nodes() {
    local line="MEGAFRONTIER_ENV_TAR: $1 fails on ${*:2}"
    shift
    [ $# -gt 0 ] || return 0
    [ $((2 * $#)) -le "$SLURM_JOB_NUM_NODES" ] || fail "$line, need an archive that fits there"
    echo "megafrontier: $line" >&2
    leave_out "$@"
}

# What becomes of a job that cannot use some of its nodes.
leave_out() {
    leave_job
    exit 69
}

# What becomes of one to which Slurm does not answer.
start_again() {
    echo "megafrontier: $*" >&2
    exit 70
}

leave_job() {
    if [ -n "${MEGAFRONTIER_ENV_TAR:-}" ]; then
        each_node rm -rf "$node_disk/environment" "$node_disk/environment.tar.gz" || true
    fi
}

each_node() {
    run srun --nodes="${SLURM_JOB_NUM_NODES:-NODES}" --ntasks-per-node=1 \
        --ntasks="${SLURM_JOB_NUM_NODES:-NODES}" "$@"
}

run() {
    if [ -n "$dry_run" ]; then show "$@"; else "$@"; fi
}

# The command of a step of all ranks, in `step`. After the first rank has ended the others have 11
# minutes (SLURM_WAIT, if set) to end by themselves: they may wait 10 for one that has not come, and
# are to say so. --kill-on-bad-exit would end them at once: those who still live could not say whom
# they lost, and srun's exit code would be that of its own kill.
make_step() {
    step=(srun --kill-on-bad-exit=0 --wait="${SLURM_WAIT:-660}")
    # Slurm tells the cores that were asked for; without, as by salloc, it is left to the site.
    local cores=${SLURM_CPUS_PER_TASK:-${dry_run:+CORES}}
    step+=(${cores:+--cpus-per-task="$cores"})
    step+=("${srun_options[@]}" python -m megafrontier "$@")
}

# What a batch file does at TERM, a few seconds (KillWait) before Slurm kills all of its job.
before_kill() { :; }

# Run a command and tell it the signals that the job gets. Returns its exit code.
run_with_signals() {
    "$@" &
    # Not local: the traps outlive this function, and an unset name would end the script in one.
    child=$!
    # Never CONT: Slurm sends it together with USR1, and bash would lose one of the two.
    # INT comes from the keyboard of an allocation, and what runs in the background does not hear of
    # it. USR1 is what srun hands on to the ranks: at TERM it kills them.
    trap 'kill -USR1 "$child" 2>/dev/null || true' USR1 INT
    trap 'kill -TERM "$child" 2>/dev/null || true; before_kill' TERM
    [ -z "$is_asked_to_stop" ] || kill -USR1 "$child"
    # In the background, because bash delays traps while it waits for a child in the foreground;
    # `wait` ends at each signal.
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
    wait "$child"
}

# What a job would do, for --dry-run: the variables it sets, then its commands.
show_job() {
    local before
    before=$(export -p)
    echo "# in the job, with slurm/env/$cluster.sh:"
    module() { show module "$@"; } # only the cluster has the real one
    enter_job
    comm -13 <(sort <<<"$before") <(export -p | sort) | sed 's/^declare -x /export /'
    make_step "$@"
    show "${step[@]}"
}
