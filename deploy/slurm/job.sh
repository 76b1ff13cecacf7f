#!/bin/bash
# SLURM's words for what a batch job needs of its scheduler.
set -euo pipefail

job_id() { echo "${SLURM_JOB_ID:-none}"; }

# How often this job went on: requeued under its own id, or by successors.
restart_count() { echo $((${BAGENT_CHAIN:-0} + ${SLURM_RESTART_COUNT:-0})); }

broadcast_file() { sbcast --force --preserve "$1" "$2"; }

# SLURM requeues by itself after lost nodes and preemption, never after the time limit.
go_on() {
    say "requeued, for the $(($1 + 1)). time of at most $REQUEUES"
    scontrol requeue "$SLURM_JOB_ID" && return
    say "requeue was refused; a successor is submitted"
    env -u BAGENT_DEADLINE -u VLLM_API_KEY BAGENT_CHAIN=$(($1 + 1)) \
        sbatch --dependency="afterany:$SLURM_JOB_ID" "$JOB_DIR/job.sh"
}
