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

# What is said of a job may not end it: its output may be on a full disk.
say() { echo "$(date -u +%FT%TZ) job $SLURM_JOB_ID: $*" || true; }

warn() { echo "megafrontier: $*" >&2 || true; }

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
[ "$dry_run" != 0 ] || dry_run=
is_asked_to_stop=
reminder=
seconds=${MEGAFRONTIER_UNPACK_SECONDS:-1800}
[[ $seconds =~ ^[1-9][0-9]*$ ]] ||
    fail "MEGAFRONTIER_UNPACK_SECONDS: $seconds, need a whole number above 0"
# What is started by this ignores the stop signal, and so does a rank until it has a handler: it may
# come while they start.
deaf=(sh -c 'trap "" USR1; exec "$@"' sh)

# Where the job will be, the config's paths are looked up, and its output's folder is made.
go_to() {
    [ -n "$1" ] && CDPATH='' cd -- "$1" 2>/dev/null || fail "--chdir: $1, need a folder"
    options+=("--chdir=$PWD")
}

# The lines above those for sbatch in the file itself.
show_help() {
    sed -n '2,/^#SBATCH/ { /^#SBATCH/q; s/^# \{0,1\}//; p }' "$0"
    exit 0
}

# Takes leading options off the arguments: sbatch's, and --dry-run. The rest is in `arguments`.
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
            # The other short ones have a value, and of the long ones those that are common.
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
        fail "${options[*]}: options of sbatch, in job $SLURM_JOB_ID; need them where that is asked" \
            "for, or to submit another job from here: env -u SLURM_JOB_ID $0 …"
}

# srun would start ranks on the first part's nodes alone, and the others' would stand idle.
refuse_parts() {
    fail "heterogeneous job (\`:\` between options): ranks run on its first part alone, need one part"
}

# asked LETTER NAME OPTION…: the value of the last of sbatch's options that is -LETTER or --NAME. Of an
# option without a letter this is =, with which none begins.
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

# --nodes=N, where sbatch's options say how many.
asked_nodes() {
    local found
    found=$(asked N nodes "$@")
    if [[ $found =~ ^[0-9]+$ ]]; then
        echo "--nodes=$found"
    else
        echo "warning: --nodes: ${found:-not given}, so nothing is checked for them; need a number" >&2
    fi
}

# --tasks-per-node=N and --tasks=N, where the batch file, the cluster or sbatch's options say how many.
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

# Whether a job with these options of sbatch gets all of the caller's variables.
gets_all_variables() {
    local option list=${SBATCH_EXPORT:-ALL}
    for option; do [[ $option != --export=* ]] || list=${option#*=}; done
    [[ ,${list^^}, == *,ALL,* ]]
}

# submit FILE OPTION… -- ARGUMENT…: hand a batch file to Slurm. Leaves the job's number in `job`.
submit() {
    local file=$1 own=() kept=() lines name until='' command code=0
    if [ -z "$dry_run" ]; then # before it waits in the queue
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
        # By another file, for sbatch to read none of another cluster's lines, of which some cannot be
        # taken back, and for a job without the caller's environment to know what it is to use.
        [ ${#sbatch_options[@]} = 0 ] || until='/^# Frontier/q;'
        mapfile -t lines < <(sed -n "$until s/^#SBATCH //p" "$file")
        command+=("${lines[@]}" "${sbatch_options[@]}" "${own[@]}")
        command+=("$home/slurm/start.sh" env "${kept[@]}" bash "$file" "$@")
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

# What this job is to Slurm: the variables of another one, from which it was submitted, may be here.
know_job() {
    local record
    # Of an array's task there may be the other tasks' records, too.
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

# The environment of a job on all its nodes.
enter_job() {
    [ -n "$dry_run" ] || [ -z "${SLURM_HET_SIZE:-}" ] || refuse_parts
    # Until a step runs, which then is told. Without this the signal would end the job.
    trap 'is_asked_to_stop=1' USR1
    # With --export=NONE sbatch has srun, too, hand on nothing of what follows.
    unset SLURM_EXPORT_ENV
    set +u # the site's own `module` may look at variables that are not set
    enter
    set -u
    if is_on_a_login_node; then # where no rank is
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
        export MASTER_ADDR
    fi
    if [ -n "${MEGAFRONTIER_ENV_TAR:-}" ]; then
        unpack_environment
    fi
    [ -n "$dry_run" ] || need_python "$(here)"
    export PYTHONNOUSERSITE=1 # a torch in ~/.local would come before a conda environment's own
    export PYTHONSAFEPATH=1   # and the package, or a random.py, of the folder that the job is in
    export PATH=$prefix/bin:$PATH
    export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # Caches on the shared file system are locked by all ranks at once, or torn.
    export MIOPEN_USER_DB_PATH=$node_disk/miopen MIOPEN_CUSTOM_CACHE_DIR=$node_disk/miopen
    export TORCHINDUCTOR_CACHE_DIR=$node_disk/inductor TRITON_CACHE_DIR=$node_disk/triton
}

unpack_environment() {
    local target=$node_disk/environment source
    [ -n "$dry_run" ] || need_archive
    try_each_node rm -rf "$target" # that an earlier start may have left, of another day
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
    unset SLURM_LABELIO # it would put something before the names
    said=$(each_node sh -c 'echo -; "$@" >&2 && echo "$SLURMD_NODENAME"' sh "$@") || true
    [ -n "$said" ] && echo "$said"
}

# sbcast stops at the first nodes that fail, and names them. Where it names none Slurm was busy.
broadcast() {
    local said failing try code
    for try in 1 2 3; do
        code=0
        said=$(run timeout --foreground --kill-after=30 "$seconds" \
            sbcast --preserve --force "$@" 2>&1) || code=$?
        [ -z "$said" ] || echo "$said" || true
        [ "$code" != 0 ] || return 0
        if [[ $code =~ ^(124|137)$ ]]; then # it hangs, and says of no node why
            seconds=60 try_each_node test -e "$2"
            break
        fi
        mapfile -t failing < <(echo "$said" | sed -n 's/.*REQUEST_FILE_BCAST(\([^)]*\)).*/\1/p')
        refuse_nodes sbcast "${failing[@]}"
        [ "$try" = 3 ] || sleep 10
    done
    start_again "MEGAFRONTIER_ENV_TAR: sbcast of $1 fails"
}

# refuse_nodes COMMAND NODE…: end the job, for another to do without these nodes. What most of them
# fail is no matter of nodes.
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

# What becomes of a job that cannot use some of its nodes.
leave_out() {
    leave_job
    exit 69
}

# What becomes of one to which Slurm does not answer.
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

# A command on each node. One that fails does not end the others', nor is one that hangs waited for.
each_node() {
    run timeout --foreground --kill-after=30 "$seconds" \
        srun --nodes="${SLURM_JOB_NUM_NODES:-NODES}" --ntasks-per-node=1 \
        --ntasks="${SLURM_JOB_NUM_NODES:-NODES}" --kill-on-bad-exit=0 --wait="$seconds" \
        "${deaf[@]}" "$@"
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
    step+=("${srun_options[@]}")
    [ "$1" != train ] || step+=("${deaf[@]}") # evaluate has no handler, and ends at the signal
    step+=(python -m megafrontier "$@")
}

# What a batch file does at TERM, a few seconds (KillWait) before Slurm kills all of its job.
before_kill() { :; }

# Run a command and tell it the signals that the job gets. Returns its exit code; 75 where the job was
# asked to stop before.
run_with_signals() {
    [ -z "$is_asked_to_stop" ] || return 75
    "$@" &
    # Not local: the traps outlive this function, and an unset name would end the script in one.
    child=$!
    # Never CONT: Slurm sends it together with USR1, and bash would lose one of the two.
    # INT comes from the keyboard of an allocation, and what runs in the background does not hear of
    # it. USR1 is what srun hands on to the ranks: at TERM it kills them.
    trap ask_to_stop USR1 INT
    trap 'kill -TERM "$child" 2>/dev/null || true; before_kill' TERM
    [ -z "$is_asked_to_stop" ] || ask_to_stop
    # In the background, because bash delays traps while it waits for a child in the foreground;
    # `wait` ends at each signal.
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
    [ -z "$reminder" ] || kill "$reminder" 2>/dev/null || true
    wait "$child"
}

# Again and again, by a signal to this script: srun loses what comes while it starts the ranks.
ask_to_stop() {
    kill -USR1 "$child" 2>/dev/null || return 0
    [ -z "$reminder" ] || kill "$reminder" 2>/dev/null || true
    { sleep 20 && kill -USR1 $$; } >/dev/null 2>&1 &
    reminder=$!
    disown "$reminder" # bash would tell of its end
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
