#!/usr/bin/env bash
# Install SLURM and munge from Debian or Ubuntu, as root: programs only, no daemon is left running.
#
#   tests/real/install_slurm.sh
#
# The cluster itself is started by tests/real/serve_slurm.py with a configuration of its own; nothing
# in /etc is used or changed. About ten seconds; a second call returns at once.
set -euo pipefail

wanted=(slurmctld slurmd srun sbatch munged ip qsub sshd ssh)
missing=()
for program in "${wanted[@]}"; do
    command -v "$program" >/dev/null || missing+=("$program")
done
if ((${#missing[@]} == 0)); then
    echo "$(slurmd -V) is installed"
    exit 0
fi
if ((EUID != 0)); then
    echo "not root: cannot install ${missing[*]}" >&2
    exit 1
fi
# Daemons that packages would start are not wanted: this says so to their scripts, for now.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client slurm-wlm-basic-plugins slurm-wlm-torque munge iproute2 \
    openssh-server openssh-client >/dev/null
slurmd -V
