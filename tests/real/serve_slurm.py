"""A real SLURM on this machine: a controller and several node daemons, each with its own name.

As root, on Linux; ``tests/real/install_slurm.sh`` installs the programs. Everything lies in one
folder. A node is a daemon that sees another host name and another /etc/hosts (its own UTS and mount
namespaces), and has an address of the loopback network to itself.

By hand: ``python tests/real/serve_slurm.py 3`` runs until Ctrl-C and prints what to export.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "unshare")
START_SECONDS = 40.0

_CONFIG = """\
ClusterName=onehost
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits one second longer than a credential lives.
AuthInfo=socket={folder}/munge.socket,cred_expire=3
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
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def env(self) -> dict[str, str]:
        """What programs of SLURM must find in their environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

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
        self._daemons.append(self._daemon("slurmctld", "-D", "-c", "-f", self.env["SLURM_CONF"]))
        for name in self.nodes:
            inside = f"mount --bind {folder}/hosts /etc/hosts && hostname {name} && exec slurmd"
            command = f"{inside} -D -N {name} -f {self.env['SLURM_CONF']}"
            self._daemons.append(self._daemon("unshare", "--uts", "--mount", "bash", "-c", command))
        self._wait_until(self._all_idle, "all nodes were idle")

    def _write_files(self) -> None:
        folder, here = self.folder, socket.gethostname().partition(".")[0]
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = _free_ports(len(self.nodes) + 1)
        hosts, lines = [f"127.0.0.1 localhost {here}"], []
        for number, (name, port) in enumerate(zip(self.nodes, ports[1:], strict=True), 21):
            address = f"127.0.0.{number}"
            hosts.append(f"{address} {name}")
            lines.append(
                f"NodeName={name} NodeHostname={name} NodeAddr={address} Port={port}"
                " CPUs=2 RealMemory=1000 State=UNKNOWN"
            )
        lines.append(f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES MaxTime=60")
        config = _CONFIG.format(here=here, folder=folder, control_port=ports[0])
        (folder / "slurm.conf").write_text(config + "\n".join(lines) + "\n")
        (folder / "hosts").write_text("\n".join(hosts) + "\n")

    def _daemon(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                words,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _all_idle(self) -> bool:
        with suppress(subprocess.SubprocessError):
            states = self.run("sinfo", "--noheader", "--Node", "--format=%t", timeout=10).split()
            return states == ["idle"] * len(self.nodes)
        return False

    def _wait_until(self, done: object, words: str) -> None:
        assert callable(done)
        end = time.monotonic() + START_SECONDS
        while not done():
            dead = [p.args for p in self._daemons if p.poll() is not None]
            assert not dead, f"a daemon ended before {words}: {dead}"
            assert time.monotonic() < end, f"not within {START_SECONDS} s: {words}"
            time.sleep(0.2)

    # --- stopping -----------------------------------------------------------------------------

    def _stop(self) -> None:
        with suppress(subprocess.SubprocessError, OSError):
            self.run("scancel", "--user=root", "--state=RUNNING,PENDING", timeout=10)
            end = time.monotonic() + 15
            while self.run("squeue", "--noheader", timeout=10).strip() and time.monotonic() < end:
                time.sleep(0.5)
        daemons = [*self._daemons, *([self._munge] if self._munge else [])]
        for process in daemons:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in daemons:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def main() -> None:
    """Run until Ctrl-C or TERM."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with SlurmCluster(count, folder) as cluster:
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}   # {count} nodes; Ctrl-C ends")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            signal.pause()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second one would leave daemons behind


if __name__ == "__main__":
    main()
