# Sourced by the batch files: the cluster's own settings, submission, and steps inside a job.
# Wants $home, the repository.
#
#   MEGAFRONTIER_CLUSTER   which file of slurm/env/; default: frontier
#   MEGAFRONTIER_PREFIX    Python environment (venv or conda); default: .venv of the repository
#   MEGAFRONTIER_ENV_TAR   what pack_env.sh made of it, to be unpacked onto every node's own disk
#   MEGAFRONTIER_UNPACK_SECONDS   after which a node that has not done so hangs; default: 1800
#   DRY_RUN=1              show what would be submitted and run, and do neither

fail() {
    echo "megafrontier: $*" >&2
    exit 2
}

# A message must not end the job: its output may be on a full disk.
say() { echo "$(date -u +%FT%TZ) job $SLURM_JOB_ID: $*" || true; }

warn() { echo "megafrontier: $*" >&2 || true; }

# Ask Slurm until it answers, for about 5 minutes, because slurmctld may be restarting. Sets `answer`.
# The loop runs in this shell, because a subshell would end at the first TERM.
patiently() {
    local pause
    for pause in {1..24}; do
        answer=$("$@") && return 0 # a bare `return` could return a trap's exit code
        sleep "$pause" || true
    done
    return 1
}

# Print each argument quoted for any POSIX shell. bash's %q may write $'…', which dash does not know.
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

# A cluster's file sets: options that replace the #SBATCH lines below "Frontier", options of each
# srun, a folder on each node's own disk, and the function `enter` that a job calls.
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
[ "$dry_run" != 0 ] || dry_run=
is_asked_to_stop=
reminder=
seconds=${MEGAFRONTIER_UNPACK_SECONDS:-1800}
[[ $seconds =~ ^[1-9][0-9]*$ ]] ||
    fail "MEGAFRONTIER_UNPACK_SECONDS: $seconds, need a whole number above 0"
# Start a command with the stop signal ignored, because the signal may arrive before a rank has
# installed its handler.
deaf=(sh -c 'trap "" USR1; exec "$@"' sh)

# Change to the job's working directory, where relative paths of the config are looked up.
go_to() {
    [ -n "$1" ] && CDPATH='' cd -- "$1" 2>/dev/null || fail "--chdir: $1, need a folder"
    options+=("--chdir=$PWD")
}

# Print the comment at the head of the batch file.
show_help() {
    sed -n '2,/^#SBATCH/ { /^#SBATCH/q; s/^# \{0,1\}//; p }' "$0"
    exit 0
}

# Split the words into leading `options` (of sbatch, and --dry-run) and `arguments`.
split_options() {
    local word
    options=()
    while [[ ${1:-} == -* ]]; do
        case $1 in
            --dry-run) dry_run=1 ;;
            --help | -h) show_help ;;
            --test-only) fail "--test-only: makes what a job needs and no job, need --dry-run" ;;
            -[HIOQVWksuv]) options+=("$1") ;;
            -a?*) options+=("--array=${1#-a}") ;;
            -a)
                options+=("--array=${2:-}")
                shift
                ;;
            --tasks-per-node=*) options+=("--n${1#--}") ;;
            --tasks-per-node)
                options+=("--ntasks-per-node=${2:-}")
                shift
                ;;
            --chdir=*) go_to "${1#*=}" ;;
            -D?*) go_to "${1#-D}" ;;
            --chdir | -D)
                go_to "${2:-}"
                shift
                ;;
            # Options that take the next word as their value: other short ones, and common long ones.
            -? | --nodes | --ntasks | --ntasks-per-node | --cpus-per-task | --time | --account | \
                --partition | --qos | --job-name | --output | --error | --array | --dependency | \
                --nodelist | --exclude | --constraint | --reservation | --begin | --mem | \
                --signal | --gres | --gpus | --gpus-per-node | --gpus-per-task | --mail-user | \
                --mail-type | --comment | --export | --licenses | --network | \
                --time-min | --tmp | --hint | --distribution | --prefer | --export-file | \
                --gpu-bind | --cpus-per-gpu | --mincpus | --priority | --core-spec | \
                --mem-per-cpu | --mem-per-gpu | --deadline | --switches | --wckey | --clusters | \
                --open-mode | --ntasks-per-gpu | --ntasks-per-socket | --ntasks-per-core | \
                --cores-per-socket | --threads-per-core | --sockets-per-node | --mem-bind | \
                --gpu-freq | --cpu-freq | --profile | --acctg-freq | --input | --container | \
                --bb | --bbf)
                if [[ $1 == --* ]]; then options+=("$1=${2:-}"); else options+=("$1" "${2:-}"); fi
                shift
                ;;
            *) options+=("$1") ;;
        esac
        [ $# = 0 ] || shift
    done
    arguments=("$@")
    for word; do [ "$word" != : ] || refuse_parts; done
    [ -z "${SLURM_JOB_ID:-}" ] || [ -n "$dry_run" ] || [ ${#options[@]} = 0 ] ||
        fail "${options[*]}: options of sbatch, but this runs in job $SLURM_JOB_ID; to submit another" \
            "job from here: env -u SLURM_JOB_ID $0 …"
}

# srun would start ranks on the nodes of the first component only, and leave the others idle.
refuse_parts() {
    fail "heterogeneous job (\`:\` between options): ranks run on its first part alone, need one part"
}

# asked LETTER NAME OPTION…: print the value of the last -LETTER or --NAME among sbatch's options.
# LETTER is = for an option that has no short form.
asked() {
    local short=-$1 long=--$2 option open='' found=''
    shift 2
    for option; do
        option=$open$option open=''
        case $option in
            "$long="*) found=${option#*=} ;;
            "$short") open=$short ;;
            "$short"*) found=${option#"$short"} ;;
        esac
    done
    echo "$found"
}

# Print --nodes=N if sbatch's options give a number of nodes.
asked_nodes() {
    local found
    found=$(asked N nodes "$@")
    if [[ $found =~ ^[0-9]+$ ]]; then
        echo "--nodes=$found"
    else
        echo "warning: --nodes: ${found:-not given}, so nothing is checked for them; need a number" >&2
    fi
}

# Print --tasks-per-node=N and --tasks=N if the batch file, the cluster or sbatch's options give them.
asked_tasks() {
    local found
    found=$(asked = ntasks-per-node "${sbatch_options[@]}" "$@")
    if [ -z "$found" ] && [ ${#sbatch_options[@]} = 0 ]; then
        found=$(sed -n 's/^#SBATCH --ntasks-per-node=//p' "$home/slurm/train.sbatch")
    fi
    [[ ! $found =~ ^[0-9]+$ ]] || echo "--tasks-per-node=$found"
    found=$(asked n ntasks "${sbatch_options[@]}" "$@")
    [[ ! $found =~ ^[0-9]+$ ]] || echo "--tasks=$found"
}

# Whether a job with these sbatch options gets all environment variables of the caller.
gets_all_variables() {
    local option list=${SBATCH_EXPORT:-ALL}
    for option; do [[ $option != --export=* ]] || list=${option#*=}; done
    [[ ,${list^^}, == *,ALL,* ]]
}

# submit FILE OPTION… -- ARGUMENT…: submit a batch file. Sets `job` to the job's number.
submit() {
    local file=$1 own=() kept=() lines name until='' command code=0
    if [ -z "$dry_run" ]; then # fail now, not after the wait in the queue
        need_archive
        need_python "$(here)"
    fi
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
        # Submit start.sh instead, because sbatch would read Frontier's #SBATCH lines, some of which
        # cannot be overridden, and because a job without the caller's environment needs ours.
        [ ${#sbatch_options[@]} = 0 ] || until='/^# Frontier/q;'
        mapfile -t lines < <(sed -n "$until s/^#SBATCH //p" "$file")
        command+=("${lines[@]}" "${sbatch_options[@]}" "${own[@]}")
        command+=("$home/slurm/start.sh" env "${kept[@]}" bash "$file" "$@")
    fi
    job=JOB
    if [ -n "$dry_run" ]; then
        show "${command[@]}"
    else
        job=$("${command[@]}") || code=$? # with --wait this is the job's exit code
        job=${job%%;*} # sbatch prints JOB;CLUSTER if there are several clusters
        [ -z "$job" ] || echo "Submitted batch job $job"
    fi
    return "$code"
}

# Ask Slurm about this job. The environment may hold variables of the job that submitted it.
know_job() {
    local record
    # For a task of an array Slurm may print the records of the other tasks, too.
    record=$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null |
        grep "^JobId=$SLURM_JOB_ID ") || return 0
    [[ ! $record =~ \ Restarts=([0-9]+)\  ]] || export SLURM_RESTART_COUNT=${BASH_REMATCH[1]}
    [[ $record == *" ArrayTaskId="* ]] || unset "${!SLURM_ARRAY_@}"
    [[ $record == *" HetJobId="* ]] || unset SLURM_HET_SIZE
}

need_archive() {
    [ -z "${MEGAFRONTIER_ENV_TAR:-}" ] ||
        [[ -f $MEGAFRONTIER_ENV_TAR && -r $MEGAFRONTIER_ENV_TAR ]] ||
        fail "MEGAFRONTIER_ENV_TAR: $MEGAFRONTIER_ENV_TAR, need what slurm/pack_env.sh wrote"
}

need_python() {
    [ -x "$1/bin/python" ] ||
        fail "MEGAFRONTIER_PREFIX: $1 has no bin/python, need a Python environment"
}

# Set up the job's environment on all its nodes.
enter_job() {
    [ -n "$dry_run" ] || [ -z "${SLURM_HET_SIZE:-}" ] || refuse_parts
    # Until a step runs, remember the signal, which would otherwise end the job.
    trap 'is_asked_to_stop=1' USR1
    # With --export=NONE sbatch sets this so that srun, too, would export nothing.
    unset SLURM_EXPORT_ENV
    set +u # the site's `module` may read unset variables
    enter
    set -u
    if is_on_a_login_node; then # rank 0 does not run here
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
        export MASTER_ADDR
    fi
    if [ -n "${MEGAFRONTIER_ENV_TAR:-}" ]; then
        unpack_environment
    fi
    [ -n "$dry_run" ] || need_python "$(here)"
    export PYTHONNOUSERSITE=1 # ignore a torch in ~/.local
    export PYTHONSAFEPATH=1   # do not import modules from the working directory
    export PATH=$prefix/bin:$PATH
    export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # On a shared file system, ranks would block each other on these caches, or corrupt them.
    export MIOPEN_USER_DB_PATH=$node_disk/miopen MIOPEN_CUSTOM_CACHE_DIR=$node_disk/miopen
    export TORCHINDUCTOR_CACHE_DIR=$node_disk/inductor TRITON_CACHE_DIR=$node_disk/triton
}

unpack_environment() {
    local target=$node_disk/environment source
    [ -n "$dry_run" ] || need_archive
    try_each_node rm -rf "$target" # may be left from an earlier start
    try_each_node mkdir -p "$target"
    unpack "$MEGAFRONTIER_ENV_TAR" "$node_disk/environment.tar.gz" "$target"
    # conda-unpack replaces the old prefix in the packed files.
    try_each_node sh -c '[ ! -e "$0"/conda-unpack ] || "$0"/python "$0"/conda-unpack' "$target/bin"
    prefix=$target
    # Copy the package as well, or each rank would open its files on the shared storage.
    source=$(mktemp)
    run tar -czf "$source" -C "$home" --exclude=__pycache__ megafrontier configs
    unpack "$source" "$target/package.tar.gz" "$target"
    rm "$source"
    package=$target
}

# A shell that salloc started may run on a login node.
is_on_a_login_node() { [ -z "$dry_run" ] && [ -z "${SLURMD_NODENAME:-}" ]; }

# The Python environment of this script. A packed environment exists on the job's nodes only.
here() {
    if is_on_a_login_node; then echo "${MEGAFRONTIER_PREFIX:-$home/.venv}"; else echo "$prefix"; fi
}

# unpack ARCHIVE COPY FOLDER: on every node.
unpack() {
    broadcast "$1" "$2"
    try_each_node tar -xzf "$2" -C "$3"
}

# Run a command on each node. End the job if it fails, or does not answer, on any of them.
try_each_node() {
    local well failing
    if [ -n "$dry_run" ]; then
        each_node "$@"
        return
    fi
    patiently hear_each_node "$@" || start_again "srun: no node answers"
    well=$answer
    # A pipe, because the list of 9,362 nodes is too long for an argument.
    mapfile -t failing < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxFf <(printf '%s\n' "$well"))
    refuse_nodes "$1" "${failing[@]}"
}

# Print the nodes on which a command succeeds. Each node prints a line first: if none does, srun
# has failed.
hear_each_node() {
    local said
    unset SLURM_LABELIO # it would prefix the names
    said=$(each_node sh -c 'echo -; "$@" >&2 && echo "$SLURMD_NODENAME"' sh "$@") || true
    [ -n "$said" ] && echo "$said"
}

# sbcast stops at the first nodes that fail and names them. If it names none, Slurm was busy.
broadcast() {
    local said failing try code
    for try in 1 2 3; do
        code=0
        said=$(run timeout --foreground --kill-after=30 "$seconds" \
            sbcast --preserve --force "$@" 2>&1) || code=$?
        [ -z "$said" ] || echo "$said" || true
        [ "$code" != 0 ] || return 0
        if [[ $code =~ ^(124|137)$ ]]; then # it hung, and names no node
            seconds=60 try_each_node test -e "$2"
            break
        fi
        mapfile -t failing < <(echo "$said" | sed -n 's/.*REQUEST_FILE_BCAST(\([^)]*\)).*/\1/p')
        refuse_nodes sbcast "${failing[@]}"
        [ "$try" = 3 ] || sleep 10
    done
    start_again "MEGAFRONTIER_ENV_TAR: sbcast of $1 fails"
}

# refuse_nodes COMMAND NODE…: end the job, so that its next start excludes these nodes. If most nodes
# fail, the cause is not a bad node.
refuse_nodes() {
    local line="MEGAFRONTIER_ENV_TAR: $1 fails on ${*:2:16}"
    shift
    [ $# -gt 0 ] || return 0
    [ $# -le 16 ] || line+=" and $(($# - 16)) more"
    if [ $((2 * $#)) -gt "$SLURM_JOB_NUM_NODES" ]; then
        leave_job
        fail "$line, need a whole archive, and room and leave to write in $node_disk"
    fi
    warn "$line"
    leave_out "$@"
}

# How a job ends that cannot use some of its nodes. train.sbatch replaces this.
leave_out() {
    leave_job
    exit 69
}

# How a job ends that gets no answer from Slurm. train.sbatch replaces this.
start_again() {
    warn "$*"
    leave_job
    exit 70
}

leave_job() {
    local seconds=180
    if [ -n "${MEGAFRONTIER_ENV_TAR:-}" ]; then
        each_node rm -rf "$node_disk/environment" "$node_disk/environment.tar.gz" || true
    fi
}

# Run a command on each node. A failure does not end the others, and a hang is not waited for.
each_node() {
    run timeout --foreground --kill-after=30 "$seconds" \
        srun --nodes="${SLURM_JOB_NUM_NODES:-NODES}" --ntasks-per-node=1 \
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
    step=(srun --kill-on-bad-exit=0 --wait="${SLURM_WAIT:-660}")
    # Slurm sets this only if cores were asked for. Otherwise the site's default applies.
    local cores=${SLURM_CPUS_PER_TASK:-${dry_run:+CORES}}
    step+=(${cores:+--cpus-per-task="$cores"})
    step+=("${srun_options[@]}")
    [ "$1" != train ] || step+=("${deaf[@]}") # evaluate has no handler: the signal ends it
    step+=(python -m megafrontier "$@")
}

# What a batch file does at TERM, KillWait seconds before Slurm kills the job. train.sbatch replaces this.
before_kill() { :; }

# Run a command and forward the job's signals to it. Returns its exit code, or 75 if the job was
# asked to stop before.
run_with_signals() {
    [ -z "$is_asked_to_stop" ] || return 75
    "$@" &
    # Not local, because the traps that read it outlive this function.
    child=$!
    # No trap for CONT: Slurm sends it together with USR1, and bash would lose one of the two.
    # INT comes from the keyboard of an allocation, which does not reach background processes.
    # srun forwards USR1 to the ranks; at TERM it would kill them.
    trap ask_to_stop USR1 INT
    trap 'kill -TERM "$child" 2>/dev/null || true; before_kill' TERM
    [ -z "$is_asked_to_stop" ] || ask_to_stop
    # In the background, because bash delays traps while a foreground child runs. `wait` returns at
    # each signal.
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
    [ -z "$reminder" ] || kill "$reminder" 2>/dev/null || true
    wait "$child"
}

# Repeat the signal to this script, because srun loses signals while it starts the ranks.
ask_to_stop() {
    kill -USR1 "$child" 2>/dev/null || return 0
    [ -z "$reminder" ] || kill "$reminder" 2>/dev/null || true
    { sleep 20 && kill -USR1 $$; } >/dev/null 2>&1 &
    reminder=$!
    disown "$reminder" # or bash would report its end
}

# For --dry-run: print the variables that a job sets, then its commands.
show_job() {
    local before
    before=$(export -p)
    echo "# in the job, with slurm/env/$cluster.sh:"
    module() { show module "$@"; } # the real one exists only on the cluster
    enter_job
    comm -13 <(sort <<<"$before") <(export -p | sort) | sed 's/^declare -x /export /'
    make_step "$@"
    show "${step[@]}"
}
