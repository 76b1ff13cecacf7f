"""Site profiles: a supercomputer's defaults for the ``cluster:`` section of a job."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from bagent.errors import JobError, Position, UsageError
from bagent.job.spec.cluster import ClusterSpec
from bagent.text.suggest import did_you_mean

GENERIC = "generic"

_JOINED = ("env", "setup", "node_setup", "modules", "directives", "exclude")
"""Keys where the job adds to the site's value instead of replacing it."""


class Queue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A queue or partition and its limits."""

    name: str
    min_nodes: int = 1
    max_nodes: int | None = None
    max_hours: float | None = None

    def accepts(self, nodes: int, walltime: float) -> bool:
        """Return whether a job of so many nodes and seconds is accepted."""
        fits = self.min_nodes <= nodes <= (self.max_nodes or nodes)
        return fits and (self.max_hours is None or walltime <= self.max_hours * 3600)

    @property
    def limits(self) -> str:
        """The limits, such as ``1-2 nodes, at most 1 h``."""
        nodes = f"{self.min_nodes}-{self.max_nodes}" if self.max_nodes else f"{self.min_nodes}+"
        hours = f", at most {self.max_hours:g} h" if self.max_hours is not None else ""
        return f"{self.name} {nodes} nodes{hours}"


class ClusterSite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A profile, from a YAML file such as those under ``deploy/sites``."""

    name: str
    about: str
    untried: tuple[str, ...] = ()  # what has not been tested on the machine
    cluster: Mapping[str, Any] = {}  # defaults of a job's section
    needs: tuple[str, ...] = ()  # keys that the user must set
    queues: tuple[Queue, ...] = ()
    select: str = ""  # added to each chunk of a PBS select line
    requests_gpus: bool = True  # False where whole nodes include their GPUs
    engine_gpus: tuple[int, ...] = ()  # GPU counts that an engine supports; empty: any
    host_suffix: str = ""  # makes a node's short name its fast address


def deploy_folder() -> Traversable:
    """Return the folder of shell parts and site profiles, of the package or the checkout."""
    packaged = files("bagent.hpc") / "deploy"
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parents[2] / "deploy"  # a checkout


def site_names() -> list[str]:
    """Return the names of the known sites."""
    folder = deploy_folder() / "sites"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name[-5:] == ".yaml")


def load_site(name: str) -> ClusterSite:
    """Return the site of that name, or from the file of that path.

    Raises:
        UsageError: there is none, or the profile is wrong.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        try:
            return read_site(path.read_text(encoding="utf-8"), path)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"--site {name}: cannot be read: {reason}") from None
    names = site_names()
    if name not in names:
        near = did_you_mean(name, names)
        raise UsageError(
            f"--site {name}: no such site",
            hint=(f"{near} " if near else "")
            + f"there are {', '.join(names)}, or a path of a .yaml",
        )
    file = deploy_folder() / "sites" / f"{name}.yaml"
    return read_site(file.read_text(encoding="utf-8"), Path(str(file)))


def read_site(text: str, path: Path) -> ClusterSite:
    """Parse a profile; errors name ``path``.

    Raises:
        JobError: it is no profile.
    """
    try:
        site = msgspec.convert(yaml.safe_load(text), ClusterSite)
        ClusterSpec.model_validate(dict(site.cluster))
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise JobError(f"not a site profile: {error}", at=Position(path)) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise JobError(
            f"cluster: {key}: {first['msg']}",
            at=Position(path),
            hint="bagent guide reference lists the keys of cluster",
        ) from None
    return site


def merged(site: ClusterSite, job: ClusterSpec) -> ClusterSpec:
    """Return the job's section over the site's defaults; lists and ``env`` are joined."""
    base = ClusterSpec.model_validate(dict(site.cluster))
    update: dict[str, Any] = {}
    for key in job.model_fields_set:
        value, before = getattr(job, key), getattr(base, key)
        if key in _JOINED:
            value = {**before, **value} if isinstance(value, Mapping) else (*before, *value)
        update[key] = value
    if (job.nodes_per_engine or 1) > 1 and job.engines_per_node is None:
        update["engines_per_node"] = None
    return base.model_copy(update=update)
