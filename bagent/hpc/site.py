"""Sites: what a supercomputer's habits add to the ``cluster:`` section of a job."""

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
"""Keys where the job adds to what the site says; elsewhere it replaces it."""


class Queue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A queue or partition and what it takes: numbers of nodes, and hours at most."""

    name: str
    min_nodes: int = 1
    max_nodes: int | None = None
    max_hours: float | None = None

    def takes(self, nodes: int, walltime: float) -> bool:
        """Whether a job of so many nodes and seconds is let in."""
        fits = self.min_nodes <= nodes <= (self.max_nodes or nodes)
        return fits and (self.max_hours is None or walltime <= self.max_hours * 3600)

    @property
    def limits(self) -> str:
        """The rule in words: ``1-2 nodes, at most 1 h``."""
        most = f"{self.min_nodes}-{self.max_nodes}" if self.max_nodes else f"{self.min_nodes}+"
        hours = f", at most {self.max_hours:g} h" if self.max_hours is not None else ""
        return f"{self.name} {most} nodes{hours}"


class ClusterSite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A profile, a YAML file under ``deploy/sites``.

    ``untried`` says what of it nobody could try. ``cluster`` has the keys of a job's section and
    is its default. ``needs`` are keys that a user must give. ``select`` is added to each chunk of
    a PBS select line, ``host_suffix`` to a node's short name to make its fast address.
    ``requests_gpus`` is false where whole nodes come with their GPUs; ``engine_gpus`` are the
    numbers of GPUs that an engine works with, none: any.
    """

    name: str
    about: str
    untried: tuple[str, ...] = ()
    cluster: Mapping[str, Any] = {}
    needs: tuple[str, ...] = ()
    queues: tuple[Queue, ...] = ()
    select: str = ""
    requests_gpus: bool = True
    engine_gpus: tuple[int, ...] = ()
    host_suffix: str = ""


def deploy_folder() -> Traversable:
    """The shell parts and site profiles: in an installed package beside this file."""
    packaged = files("bagent.hpc") / "deploy"
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parents[2] / "deploy"  # a checkout


def site_names() -> list[str]:
    """The known sites."""
    folder = deploy_folder() / "sites"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name[-5:] == ".yaml")


def load_site(name: str) -> ClusterSite:
    """The site of that name, or the profile in the file of that path.

    Raises:
        UsageError: there is none, or the profile is wrong.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        try:
            return read_site(path.read_text(encoding="utf-8"), path)
        except OSError as error:
            words = (error.strerror or str(error)).lower()
            raise UsageError(f"--site {name}: cannot be read: {words}") from None
    known = site_names()
    if name not in known:
        near = did_you_mean(name, known)
        raise UsageError(
            f"--site {name}: no such site",
            hint=f"{near} " * bool(near) + f"there are {', '.join(known)}, or a path of a .yaml",
        )
    file = deploy_folder() / "sites" / f"{name}.yaml"
    return read_site(file.read_text(encoding="utf-8"), Path(str(file)))


def read_site(text: str, path: Path) -> ClusterSite:
    """The profile in ``text``; ``path`` is named in errors.

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
        raise JobError(f"cluster: {key}: {first['msg']}", at=Position(path)) from None
    return site


def merged(site: ClusterSite, job: ClusterSpec) -> ClusterSpec:
    """The job's section over the site's: lists and ``env`` of both, else the job's where given."""
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
