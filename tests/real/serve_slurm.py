"""A real SLURM on this machine: a controller and several node daemons, each with its own name.

As root, on Linux; ``tests/real/install_slurm.sh`` installs the programs. Everything lies in one
folder. A node is a daemon that sees another host name, another /etc/hosts and a network card of its
own (its UTS, mount and network namespaces), behind a bridge on this machine. It can be crashed and
cut off.

Jobs of the partition "pbs" see what a job of OpenPBS sees: PBS_JOBID and PBS_NODEFILE, and none of
SLURM's variables. SLURM's own qsub submits them; nodes are reached by ssh (``ssh_folder`` first on
PATH), as srun is not there.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from real.parts import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "unshare", "ip")
SSHD = "/usr/sbin/sshd"
_SINFO = ("sinfo", "--noheader", "--Node", "--partition=all", "--format=%t")
BRIDGE = "bagentslurm"
NETWORK = "10.87.21"  # this machine is .1 in it, node n1 .11

START_SECONDS = 40.0

_CONFIG = """\
ClusterName=onehost
SlurmctldHost={here}({network}.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits one second longer than a credential lives.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/node.%n.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/node.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=2
ReturnToService=2
SlurmdTimeout=15
KillWait=5
TaskProlog={folder}/prolog
"""

# What is printed as "export NAME=VALUE" or "unset NAME" is done in the job's environment.
_PROLOG = """\
#!/bin/bash
export SLURM_CONF={folder}/slurm.conf
[ "$SLURM_JOB_PARTITION" = pbs ] || exit 0
file={folder}/nodefile.$SLURM_JOB_ID
scontrol show hostnames "$SLURM_JOB_NODELIST" >"$file"
echo "export SLURM_CONF=$SLURM_CONF"
echo "export PBS_NODEFILE=$file"
echo "export PBS_JOBID=$SLURM_JOB_ID"
echo "export PBS_ENVIRONMENT=PBS_BATCH"
env | sed -n 's/^\\(SLURM_[A-Z_0-9]*\\)=.*/\\1/p' | grep -v '^SLURM_CONF$' | sed 's/^/unset /'
"""

_SSHD = """\
HostKey {folder}/ssh.key
AuthorizedKeysFile {folder}/ssh.key.pub
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
PidFile none
"""

_SSH = """\
#!/bin/sh
exec /usr/bin/ssh -i {folder}/ssh.key -o UserKnownHostsFile=/dev/null \\
    -o StrictHostKeyChecking=no -o LogLevel=ERROR "$@"
"""


class SlurmCluster:
    """SLURM with nodes n1 to nN between ``with`` and its end.

    Args:
        nodes: how many.
        folder: for configuration, state and logs; its path should be short (a socket lies in it).
    """

    def __init__(self, nodes: int, folder: Path) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._munge: subprocess.Popen[bytes] | None = None
        self._control: subprocess.Popen[bytes] | None = None
        self._node_daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """This machine's address, as the nodes see it."""
        return f"{NETWORK}.1"

    @property
    def env(self) -> dict[str, str]:
        """What programs of SLURM must find in their environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def ssh_folder(self) -> str:
        """A folder with an ``ssh`` that the nodes let in."""
        return str(self.folder / "bin")

    def run(self, *words: str, timeout: float = 60.0) -> str:
        """The stdout of a program of SLURM.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        done = subprocess.run(
            words,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        )
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol`` tells of a job, by field."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def crash(self, node: str) -> None:
        """End everything that runs on a node at once, as a loss of power does."""
        daemon = self._node_daemons[node]
        space = Path(f"/proc/{daemon.pid}/ns/uts").readlink()
        for _ in range(3):  # what was just being started by those that are killed
            for process in Path("/proc").iterdir():
                with suppress(OSError):
                    if process.name.isdigit() and (process / "ns/uts").readlink() == space:
                        os.kill(int(process.name), signal.SIGKILL)
        daemon.wait(10)

    def cut_off(self, node: str) -> None:
        """Pull the network cable of a node; what runs there goes on."""
        _ip("link", "set", _card(node), "down")

    def revive(self, *nodes: str) -> None:
        """Bring nodes that were crashed or cut off back, and wait until all nodes take jobs."""
        for node in nodes:
            if self._node_daemons[node].poll() is None:
                self.crash(node)  # one that was cut off would take a minute to come back by itself
            self._start_node(node)
        self._wait_until(self._all_idle, f"{', '.join(nodes)} came back")

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    def __enter__(self) -> Self:
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        assert not missing, f"tests/real/install_slurm.sh installs {', '.join(missing)}"
        try:
            self._start()
        except BaseException:
            print(self.logs(), file=sys.stderr)
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._stop()

    # --- starting -----------------------------------------------------------------------------

    def _start(self) -> None:
        self._write_files()
        folder = self.folder
        self._munge = self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
        )
        self._wait_until(lambda: (folder / "munge.socket").exists(), "munged made its socket")
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", BRIDGE)  # of one that was killed
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        self._control = self._daemon("slurmctld", "-D", "-c", "-f", self.env["SLURM_CONF"])
        for name in self.nodes:
            self._start_node(name)
        self._wait_until(self._all_idle, "all nodes were idle")

    def _start_node(self, name: str) -> None:
        inside = f"read -r; mount --bind {self.folder}/hosts /etc/hosts; hostname {name}"
        sshd = f"{{ test ! -x {SSHD} || {SSHD} -D -f {self.folder}/sshd_config & }}"
        command = f"{inside}; {sshd}; exec slurmd -D -N {name} -f {self.env['SLURM_CONF']}"
        words = ("unshare", "--uts", "--mount", "--net", "bash", "-c", command)
        daemon = self._daemon(*words, stdin=subprocess.PIPE)
        self._node_daemons[name] = daemon
        ours = Path("/proc/self/ns/net").readlink()
        self._wait_until(
            lambda: Path(f"/proc/{daemon.pid}/ns/net").readlink() != ours, f"{name} was apart"
        )
        card, space = _card(name), str(daemon.pid)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", card)  # the kernel may not have taken the last one away yet
        _ip("link", "add", card, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", card, "master", BRIDGE, "up")
        inner = f"ip addr add {_address(name)}/24 dev eth0; ip link set eth0 up; ip link set lo up"
        route = f"ip route add default via {self.address}"
        inside_of = ["nsenter", f"--net=/proc/{space}/ns/net"]
        subprocess.run([*inside_of, "sh", "-ec", f"{inner}; {route}"], check=True)
        assert daemon.stdin is not None
        daemon.stdin.write(b"\n")
        daemon.stdin.close()

    def _write_files(self) -> None:
        folder, here = self.folder, socket.gethostname().partition(".")[0]
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        port = free_port()
        hosts, lines = ["127.0.0.1 localhost", f"{self.address} {here}"], []
        for name in self.nodes:
            hosts.append(f"{_address(name)} {name}")
            lines.append(
                f"NodeName={name} NodeHostname={name} NodeAddr={_address(name)} Port=17001"
                " CPUs=2 RealMemory=1000 State=UNKNOWN"
            )
        names = ",".join(self.nodes)
        lines.append(f"PartitionName=all Nodes={names} Default=YES MaxTime=60")
        lines.append(f"PartitionName=pbs Nodes={names} MaxTime=60")
        config = _CONFIG.format(here=here, folder=folder, control_port=port, network=NETWORK)
        (folder / "slurm.conf").write_text(config + "\n".join(lines) + "\n")
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        (folder / "sshd_config").write_text(_SSHD.format(folder=folder))
        (folder / "bin").mkdir()
        for path, text in ((folder / "prolog", _PROLOG), (folder / "bin/ssh", _SSH)):
            path.write_text(text.format(folder=folder))
            path.chmod(0o755)
        if Path(SSHD).exists():
            Path("/run/sshd").mkdir(exist_ok=True)
            words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "ssh.key"))
            subprocess.run(words, check=True)

    def _daemon(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                words,
                env={**os.environ, **self.env},
                stdin=stdin,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _all_idle(self) -> bool:
        with suppress(subprocess.SubprocessError):
            states = self.run(*_SINFO, timeout=10).split()
            return states == ["idle"] * len(self.nodes)
        return False

    def _wait_until(self, done: object, words: str) -> None:
        assert callable(done)
        end = time.monotonic() + START_SECONDS
        while not done():
            control = self._control
            assert control is None or control.poll() is None, f"slurmctld ended before {words}"
            assert time.monotonic() < end, f"not within {START_SECONDS} s: {words}"
            time.sleep(0.2)

    # --- stopping -----------------------------------------------------------------------------

    def _stop(self) -> None:
        with suppress(subprocess.SubprocessError, OSError):
            self.run("scancel", "--user=root", "--state=RUNNING,PENDING", timeout=10)
            end = time.monotonic() + 15
            while self.run("squeue", "--noheader", timeout=10).strip() and time.monotonic() < end:
                time.sleep(0.5)
        started = [*self._node_daemons.values(), self._control, self._munge]
        daemons = [process for process in started if process is not None]
        for process in daemons:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in daemons:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", BRIDGE)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _card(node: str) -> str:
    """This machine's end of a node's cable."""
    return f"{BRIDGE}{node[1:]}"


def _address(node: str) -> str:
    return f"{NETWORK}.{10 + int(node[1:])}"
