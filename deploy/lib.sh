#!/bin/bash
# The steps of a batch job. `bagent submit` puts them behind the settings of a job, and the words
# of its scheduler (slurm/job.sh or pbs/job.sh) behind them. What needs more than a few lines is
# Python: python -m bagent.hpc.
set -euo pipefail

# Seconds that the end of the script may take once bagent has ended: engines, logs, requeue.
END_SECONDS=30
# How often the script says that it lives, and after which silence the nodes take it for lost.
BEAT_SECONDS=10
SILENCE_SECONDS=${BAGENT_SILENCE_SECONDS:-120}
BEAT='' CHILD='' ENGINES='' LATE='' SIGNAL='' SIGNALS=0

main() {
    trap 'signalled TERM' TERM
    trap 'signalled INT' INT
    trap 'signalled USR1' USR1
    trap 'signalled USR2' USR2
    prepare
    find_nodes
    attend stage_files
    drop_unstaged_nodes
    start_engines
    write_hostfile
    attend wait_for_engines
    follow_late_engines
    attend wait_for_owner
    attend run_job
    finish 0
}

say() { printf '%(%FT%T)T job: %s\n' -1 "$*" >&2; }

# --- 1. a folder for this job, its environment, its end --------------------------------------
prepare() {
    cd "$WORK_DIR"
    JOB_DIR="$BATCH_DIR/$(job_id).$(restart_count)"
    (umask 077 && mkdir -p "$JOB_DIR/engines" "$JOB_DIR/staged")
    STAGE_TO=${STAGE_TO//\$USER/${USER:-$(id -un)}}
    if [[ -r $0 && $(head -c 2 "$0") == '#!' ]]; then cp "$0" "$JOB_DIR/job.sh"; fi
    # The functions behind `module` use variables that are not set.
    set +u
    set_up
    set -u
    # Traffic inside the machine must not go through the way out of it.
    if [[ -z ${KEEP_PROXIES:-} ]]; then
        unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
    fi
    if [[ -z ${VLLM_API_KEY:-} ]]; then
        VLLM_API_KEY=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
    fi
    (umask 077 && printf '%s\n' "$VLLM_API_KEY" >"$JOB_DIR/key")
    if [[ -z ${BAGENT_DEADLINE:-} ]]; then
        BAGENT_DEADLINE=$("$PYTHON" -m bagent.hpc deadline --walltime "$WALLTIME" --less "$END_SECONDS")
    fi
    export VLLM_API_KEY BAGENT_DEADLINE
    say "files of this job: $JOB_DIR"
    local name
    for name in JOB_FILE WORK_DIR PYTHON LAUNCHER WALLTIME BAGENT_DEADLINE NODES_PER_ENGINE \
        GPUS_PER_NODE GPU_MASK RESTARTS REQUEUES MIN_FRACTION START_TIMEOUT STAGE_BY STAGE_TO; do
        say "$name=${!name}"
    done
    say "ENGINE=${ENGINE[*]} on ports ${PORTS[*]}; STAGE=${STAGE[*]}; RUN_OPTIONS=${RUN_OPTIONS[*]}"
}

# --- 2. the nodes, each once, without bad ones ------------------------------------------------
find_nodes() {
    local options=(--skip "$RESERVE_NODE" --exclude "$EXCLUDE")
    if [[ -e $BATCH_DIR/bad-nodes.txt ]]; then options+=(--exclude-file "$BATCH_DIR/bad-nodes.txt"); fi
    "$PYTHON" -m bagent.hpc nodes "${options[@]}" >"$JOB_DIR/nodes" || finish $?
    write_node_script
    set_launcher
}

# One small script for all that is done on a node: not every launcher brings the environment.
write_node_script() {
    NODE="$JOB_DIR/node.sh"
    local name pair
    (
        umask 077
        {
            echo '#!/bin/bash'
            printf 'cd %q\n' "$WORK_DIR"
            for name in PATH LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV CONDA_PREFIX BAGENT_PYTHON; do
                if [[ -n ${!name:-} ]]; then printf 'export %s=%q\n' "$name" "${!name}"; fi
            done
            for pair in "${NODE_ENV[@]}"; do printf 'export %s=%q\n' "${pair%%=*}" "${pair#*=}"; done
            echo 'unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY'
            printf 'export VLLM_API_KEY=%q\n' "$VLLM_API_KEY"
            printf '%s\n' "$NODE_SETUP"
            printf 'exec %q -m bagent.hpc "$@"\n' "$PYTHON"
        } >"$NODE"
        chmod 700 "$NODE"
    )
}

# "${LAUNCH[@]}" COMMAND runs COMMAND once on every node of $JOB_DIR/nodes.
set_launcher() {
    NODE_COUNT=$(wc -l <"$JOB_DIR/nodes")
    local list="$JOB_DIR/nodes"
    STOP=TERM
    case $LAUNCHER in
        srun)
            # srun answers TERM by killing its tasks at once; this one it hands to them.
            STOP=USR2
            LAUNCH=(srun --overlap --nodes="$NODE_COUNT" --ntasks="$NODE_COUNT" --ntasks-per-node=1
                --nodelist="$list" --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none --mem=0
                --no-kill --kill-on-bad-exit=0 --wait=0 --input=none)
            ;;
        pals) LAUNCH=(mpiexec --np "$NODE_COUNT" --ppn 1 --hostfile "$list" --cpu-bind none --no-abort-on-failure) ;;
        hydra) LAUNCH=(mpiexec -n "$NODE_COUNT" -ppn 1 -f "$list" -bind-to none) ;;
        openmpi) LAUNCH=(mpiexec -n "$NODE_COUNT" --map-by ppr:1:node --bind-to none --hostfile "$list") ;;
        ssh) LAUNCH=("$PYTHON" -m bagent.hpc ssh --nodes "$list" --) ;;
        *)
            say "no such launcher: $LAUNCHER"
            finish 2
            ;;
    esac
    say "$NODE_COUNT nodes for engines: $(head -n 3 "$list" | tr '\n' ' ')..."
}

# --- 3. weights and environment to the nodes' own disks ---------------------------------------
stage_files() {
    if [[ $STAGE_BY == none ]]; then return; fi
    say "staging ${STAGE[*]} to $STAGE_TO by $STAGE_BY"
    local options=(--to "$STAGE_TO" --done "$JOB_DIR/staged")
    options+=(--signature "$("$PYTHON" -m bagent.hpc signature "${STAGE[@]}")")
    case $STAGE_BY in
        copy) "${LAUNCH[@]}" "$NODE" stage "${options[@]}" "${STAGE[@]}" || true ;;
        mpi) "${LAUNCH[@]}" "$NODE" broadcast "${options[@]}" "${STAGE[@]}" || true ;;
        sbcast)
            # Nobody can know this name before, and so make a file or a link of it.
            local copy item words=() archive="$JOB_DIR/stage.tar"
            copy="$STAGE_TO.$(job_id).$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n').tar"
            for item in "${STAGE[@]}"; do words+=(-C "$(dirname "$item")" "$(basename "$item")"); done
            (umask 077 && tar -cf "$archive" "${words[@]}")
            # sbcast leaves parts of a file behind when it fails; the nodes look at its length.
            broadcast_file "$archive" "$copy" || say "sbcast failed on some node"
            options+=(--archive "$copy" --size "$(stat -c %s "$archive")")
            "${LAUNCH[@]}" "$NODE" stage "${options[@]}" "${STAGE[@]}" || true
            rm -f "$archive"
            ;;
    esac
}

# A launcher's exit code does not tell which node failed: each node that is done has said so.
drop_unstaged_nodes() {
    if [[ $STAGE_BY == none ]]; then return; fi
    local node
    while read -r node; do
        if [[ -e "$JOB_DIR/staged/$(short "$node")" ]]; then echo "$node"; else say "$node was not staged and is left out"; fi
    done <"$JOB_DIR/nodes" >"$JOB_DIR/nodes.staged"
    mv "$JOB_DIR/nodes.staged" "$JOB_DIR/nodes"
    if [[ ! -s $JOB_DIR/nodes ]]; then
        say "no node could be staged"
        finish 76
    fi
    set_launcher
}

# --- 4. engines, kept running on every node ---------------------------------------------------
start_engines() {
    beat &
    BEAT=$!
    "${LAUNCH[@]}" "$NODE" supervise --folder "$JOB_DIR/engines" --nodes "$JOB_DIR/nodes" \
        --ports "${PORTS[*]}" --span "$NODES_PER_ENGINE" --gpus "$GPUS_PER_NODE" --mask "$GPU_MASK" \
        --alive "$JOB_DIR/alive" --silence "$SILENCE_SECONDS" --restarts "$RESTARTS" --stage "$STAGE_TO" --suffix "$HOST_SUFFIX" -- "${ENGINE[@]}" \
        >"$JOB_DIR/launcher.log" 2>&1 &
    ENGINES=$!
}

# A job can outlive its first node, and with it this script: the engines' nodes notice by this.
beat() {
    while kill -0 $$ 2>/dev/null; do
        touch "$JOB_DIR/alive"
        sleep "$BEAT_SECONDS"
    done
}

# --- 5. the hostfile, whole or not there ------------------------------------------------------
write_hostfile() {
    local node port number=0 count=$((NODE_COUNT / NODES_PER_ENGINE * NODES_PER_ENGINE))
    while read -r node; do
        if ((number < count && number % NODES_PER_ENGINE == 0)); then
            for port in "${PORTS[@]}"; do
                printf '%s\t%s\t%s\tnode=%s\n' "$(address "$node")" "$port" "$TAGS" "$(short "$node")"
            done
        fi
        number=$((number + 1))
    done <"$JOB_DIR/nodes" >"$JOB_DIR/hosts.tmp"
    mv "$JOB_DIR/hosts.tmp" "$JOB_DIR/hosts.txt"
    say "$(wc -l <"$JOB_DIR/hosts.txt") engines, in $JOB_DIR/hosts.txt"
}

address() { if [[ -n $HOST_SUFFIX ]]; then echo "$(short "$1")$HOST_SUFFIX"; else echo "$1"; fi; }

# A host name without its domain; an address stays whole.
short() { if [[ $1 =~ ^[0-9.]+$ ]]; then echo "$1"; else echo "${1%%.*}"; fi; }

# --- 6. until enough of them answer -----------------------------------------------------------
wait_for_engines() {
    exec "$PYTHON" -m bagent.hpc wait "$JOB_DIR" --min-fraction "$MIN_FRACTION" \
        --timeout "$START_TIMEOUT" --launcher "$ENGINES"
}

follow_late_engines() {
    "$PYTHON" -m bagent.hpc late "$JOB_DIR" >>"$JOB_DIR/late.log" 2>&1 &
    LATE=$!
}

# --- 7. the run -------------------------------------------------------------------------------
# A job that is requeued since its node was lost is sooner here than anybody can tell that
# the process which owned the run there is gone.
wait_for_owner() {
    if (($(restart_count) == 0)); then return; fi
    exec "$PYTHON" -m bagent.hpc vacant "$RUN_DIR"
}

run_job() {
    exec "$PYTHON" -m bagent run "$JOB_FILE" "${RUN_OPTIONS[@]}" --hostfile "$JOB_DIR/ready.txt" --deadline auto
}

# Run "$@" beside this shell: a trap waits for the command in front, and must not wait here.
attend() {
    if [[ -n $SIGNAL ]]; then finish 75; fi
    local code before
    "$@" &
    CHILD=$!
    while :; do
        before=$SIGNALS code=0
        wait "$CHILD" || code=$?
        # A signal ends the wait and not the command.
        if ((SIGNALS == before || code <= 128)); then break; fi
    done
    CHILD=''
    # Killed by the signal that was passed on: stopped early, as bagent itself would say.
    if [[ -n $SIGNAL ]] && ((code > 128 && code != 130)); then code=75; fi
    if ((code != 0)); then finish "$code"; fi
}

signalled() {
    say "got $1"
    SIGNAL=$1 SIGNALS=$((SIGNALS + 1))
    if [[ -n $CHILD ]]; then kill -"$1" "$CHILD" 2>/dev/null || true; fi
}

# --- 8. and 9. the end: own children stopped, what failed is shown, bagent's exit code ----------
finish() {
    local code=$1
    trap '' USR1 USR2 TERM INT
    stop_child "$BEAT" KILL
    stop_child "$LATE" TERM
    stop_child "$ENGINES" "${STOP:-TERM}"
    if [[ -n $ENGINES ]]; then "$PYTHON" -m bagent.hpc engines "$JOB_DIR" >&2 || true; fi
    say "exit code $code"
    if ((code == 75)); then go_on_later; fi
    exit "$code"
}

stop_child() {
    if [[ -z $1 ]]; then return; fi
    kill -"$2" "$1" 2>/dev/null || return 0
    local tries
    for ((tries = 0; tries < 75; tries++)); do
        kill -0 "$1" 2>/dev/null || break
        sleep 0.2
    done
    kill -TERM "$1" 2>/dev/null && sleep 1
    kill -KILL "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}

# 75 goes on by itself, unless a person stopped the job: scancel and qdel send TERM.
go_on_later() {
    local count
    count=$(restart_count)
    if [[ $SIGNAL == TERM || $SIGNAL == INT || -e $RUN_DIR/stop ]]; then
        say "stopped by hand; the same script goes on when it is submitted again"
    elif ((count >= REQUEUES)); then
        say "went on $count times already, which is the limit (cluster.requeues)"
    else
        go_on "$count"
    fi
}
