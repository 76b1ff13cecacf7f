#!/bin/bash
# PBS's words for what a batch job needs of its scheduler.
set -euo pipefail

job_id() {
    local id=${PBS_JOBID:-none}
    echo "${id%%.*}"
}

# How often this job went on: each time is a new job, which the one before names a number.
restart_count() { echo "${BAGENT_CHAIN:-0}"; }

broadcast_file() {
    say "there is no sbcast under PBS"
    return 1
}

# PBS runs a job again after lost nodes (-r y); after the time limit a successor has to.
go_on() {
    if [[ ! -r $JOB_DIR/job.sh ]]; then
        say "the script of this job is not known; submit it again to go on"
        return
    fi
    say "a successor goes on, the $(($1 + 1)). of at most $REQUEUES"
    qsub -W depend="afterany:$PBS_JOBID" -v BAGENT_CHAIN=$(($1 + 1)) "$JOB_DIR/job.sh"
}
