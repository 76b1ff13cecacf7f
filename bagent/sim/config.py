"""Settings of simulated engines: frozen values, read from a URL, from options or made in code.

Every setting has one flat name (``decode``, ``rate_429``), used in ``sim://?decode=50``, in
``bagent sim --decode 50`` and as a field. :data:`OPTIONS` lists them all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, get_type_hints
from urllib.parse import parse_qsl, unquote, urlsplit

from bagent.errors import JobError
from bagent.text.durations import parse_duration
from bagent.text.suggest import nearest_name

T = TypeVar("T")

BLOCK = 16
"""Tokens in one block of the KV cache, as in vLLM's default."""

SPREADS = ("geometric", "normal", "fixed")
"""Distributions of the length of free answers."""

_TYPE_DESCRIPTIONS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "rate": "a rate such as 0.1 or 10%",
    "seconds": "a duration such as 2s or 500ms",
}


def _option(default: T, text: str, kind: str = "") -> T:
    """Return a dataclass field with its help text; ``kind`` is ``rate`` or ``seconds`` where not
    plain."""
    return field(default=default, metadata={"help": text, "kind": kind})


def _need(condition: bool, name: str, rule: str) -> None:
    if not condition:
        raise JobError(
            f"simulated engine: '{name}' must be {rule}", hint="bagent sim -h lists the options"
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Size and speed of one engine.

    One step takes ``prefilled tokens / prefill + (1 + batch_slowdown * (b - 1)) / decode`` seconds
    with ``b`` decoding sequences (without the second term for ``b`` = 0) and gives each one token.
    """

    max_model_len: int = _option(8192, "Context length in tokens: prompt and answer together.")
    max_num_seqs: int = _option(256, "Sequences in one batch; more wait in the queue.")
    max_num_batched_tokens: int = _option(
        8192, "Tokens in one step; longer prefills go in several."
    )
    prefill: float = _option(20_000.0, "Prefill speed in tokens a second.")
    decode: float = _option(100.0, "Decode speed of one sequence alone, in tokens a second.")
    batch_slowdown: float = _option(
        0.01, "How much each further sequence lengthens a decode step, as a fraction of it."
    )
    kv_tokens: int | None = _option(
        None, "Tokens that the KV cache holds; unset is 262144, or max_model_len if that is more."
    )
    prefix_cache: bool = _option(True, "Reuse the KV cache of equal prompt beginnings.")
    priority: bool = _option(False, "Serve requests by their 'priority', lower first.")

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            _need(getattr(self, name) >= 1, name, "at least 1")
        _need(0 < self.prefill < math.inf, "prefill", "above 0")
        _need(0 < self.decode < math.inf, "decode", "above 0")
        _need(0 <= self.batch_slowdown < math.inf, "batch_slowdown", "at least 0")
        _need(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            "at least max_num_seqs",
        )
        _need(
            self.kv_tokens is None or self.kv_tokens >= self.max_model_len,
            "kv_tokens",
            "at least max_model_len",
        )

    @property
    def kv_blocks(self) -> int:
        """Return how many blocks of :data:`BLOCK` tokens the KV cache holds."""
        tokens = self.kv_tokens or max(262_144, self.max_model_len)
        return -(-tokens // BLOCK)


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """Form of the answers."""

    output_tokens: int = _option(64, "Mean length of free answers in tokens.")
    output_spread: str = _option(
        "geometric", f"How lengths vary around the mean: {', '.join(SPREADS)}."
    )
    tool_rate: float = _option(
        0.5, "Chance, each turn, that a request with tools and tool_choice auto calls one.", "rate"
    )
    embedding_size: int = _option(64, "Numbers in an embedding vector.")

    def __post_init__(self) -> None:
        _need(self.output_tokens >= 1, "output_tokens", "at least 1")
        _need(self.output_spread in SPREADS, "output_spread", f"one of {', '.join(SPREADS)}")
        _need(0 <= self.tool_rate <= 1, "tool_rate", "between 0 and 1")
        _need(self.embedding_size >= 1, "embedding_size", "at least 1")


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Injected faults; rates are per generation request, drawn from the seed."""

    rate_429: float = _option(0.0, "Rate of 429 answers.", "rate")
    retry_after: float | None = _option(
        None, "Seconds that a 429 names in Retry-After; unset sends no such header.", "seconds"
    )
    max_queue: int | None = _option(
        None, "Waiting requests beyond which the engine answers 503; unset is no bound."
    )
    stall_rate: float = _option(
        0.0, "Rate of requests that get no byte for 'stall' seconds.", "rate"
    )
    stall: float = _option(30.0, "How long a stalled request stands, in seconds.", "seconds")
    cut_rate: float = _option(0.0, "Rate of answers whose connection closes half way.", "rate")
    malformed_rate: float = _option(0.0, "Rate of 200 answers whose JSON is broken.", "rate")
    disorder_rate: float = _option(
        0.0, "Rate of answers whose choices come in reverse order (with true indexes).", "rate"
    )
    slow: float = _option(1.0, "Factor by which the engine is slower.")
    dead_after: int | None = _option(
        None, "Generation requests after which the server closes its socket for good."
    )
    faulty: int | None = _option(None, "Only the last N replicas have these faults; unset is all.")

    def __post_init__(self) -> None:
        for name in ("rate_429", "stall_rate", "cut_rate", "malformed_rate", "disorder_rate"):
            _need(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        for name in ("retry_after", "max_queue", "stall", "dead_after", "faulty"):
            value = getattr(self, name)
            _need(value is None or value >= 0, name, "at least 0")
        _need(0 < self.slow < math.inf, "slow", "above 0")


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A fleet of equal simulated engines.

    ``model`` always shows that it is simulated: a name that neither starts with ``sim-`` nor
    contains ``simulated`` gets the prefix ``sim-``.

    Raises:
        JobError: a value is out of range.
    """

    replicas: int = _option(1, "Number of endpoints.")
    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(0, "Port of the first endpoint, the others follow; 0 takes free ones.")
    model: str = _option("simulated-8b", "Model name; 'sim-' is put before a name that hides it.")
    seed: int = _option(0, "Seed of answers and faults.")
    speedup: float = _option(1.0, "Factor by which everything simulated is faster.")
    api_key: str | None = _option(None, "Key that the /v1 routes ask for; unset asks for none.")
    keep_alive: float = _option(5.0, "Seconds until an idle connection is closed.", "seconds")
    engine: EngineConfig = field(default_factory=EngineConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        _need(self.replicas >= 1, "replicas", "at least 1")
        _need(0 <= self.port <= 65535, "port", "between 0 and 65535")
        _need(
            self.port == 0 or self.port + self.replicas <= 65536,
            "port",
            "low enough that every replica gets one",
        )
        _need(0 < self.speedup < math.inf, "speedup", "above 0")
        _need(0 < self.keep_alive < math.inf, "keep_alive", "above 0")
        _need(bool(self.model.strip()), "model", "a name")
        if not self.model.startswith("sim-") and "simulated" not in self.model.lower():
            object.__setattr__(self, "model", f"sim-{self.model}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SimConfig:
        """Make a config from flat names; texts are read as numbers, rates and durations.

        Args: values: option names (see :data:`OPTIONS`) to texts or values. Rates may be ``0.1`` or
        ``10%``, durations seconds or ``500ms``, ``2s``, ``1m``; ``none`` unsets an optional value.

        Raises:
            JobError: an unknown name or a value that cannot be read.
        """
        groups: dict[str, dict[str, Any]] = {group: {} for group in ("", *_GROUPS)}
        for name, value in values.items():
            option = OPTIONS.get(name)
            if option is None:
                nearest = nearest_name(name, OPTIONS)
                hint = f"did you mean '{nearest}'?" if nearest else f"known: {', '.join(OPTIONS)}"
                raise JobError(f"simulated engine: unknown option '{name}'", hint=hint)
            groups[option.group][name] = option.read(value)
        configs = {
            group: config_type(**groups[group])
            for group, config_type in _GROUPS.items()
            if groups[group]
        }
        return cls(**groups[""], **configs)


_GROUPS: dict[str, type[Any]] = {
    "engine": EngineConfig,
    "answers": AnswerConfig,
    "faults": FaultConfig,
}


@dataclass(frozen=True, slots=True)
class SimOption:
    """One setting: flat name, group of the config, type and default."""

    name: str
    group: str
    type: type[Any]
    default: Any
    help: str
    kind: str = ""
    optional: bool = False

    def read(self, value: Any) -> Any:
        """Convert a text to this option's type; any other value is returned unchanged.

        Raises:
            JobError: the text cannot be read.
        """
        if not isinstance(value, str):
            return value
        if self.optional and value.strip().lower() == "none":
            return None
        try:
            return _READERS[self.kind or self.type.__name__](value.strip())
        except (ValueError, KeyError):
            description = _TYPE_DESCRIPTIONS[self.kind or self.type.__name__]
            raise JobError(
                f"simulated engine: '{self.name}' is {description}, not {value!r}",
                hint="bagent sim -h lists the options",
            ) from None


def _read_bool(text: str) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
        text.lower()
    ]


def _read_rate(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": _read_bool,
    "rate": _read_rate,
    "seconds": parse_duration,
}


def _options() -> dict[str, SimOption]:
    options: dict[str, SimOption] = {}
    for group, config_type in (("", SimConfig), *_GROUPS.items()):
        hints = get_type_hints(config_type)
        for spec in fields(config_type):
            if spec.default is MISSING:
                continue
            hint = hints[spec.name]
            types = [a for a in getattr(hint, "__args__", (hint,)) if a is not type(None)]
            options[spec.name] = SimOption(
                spec.name,
                group,
                types[0],
                spec.default,
                spec.metadata["help"],
                spec.metadata["kind"],
                optional=types[0] is not hint,
            )
    return options


OPTIONS: dict[str, SimOption] = _options()
"""Every setting by its flat name, in the order of the classes."""


def parse_sim_url(url: str) -> SimConfig:
    """Read ``sim``, ``sim://?replicas=2&decode=50`` or ``sim://MODEL?...``.

    Raises:
        JobError: it is no such URL, or an option is unknown, repeated or unreadable.
    """
    parts = urlsplit(url)
    if url != "sim" and parts.scheme != "sim":
        raise JobError(f"not a sim:// URL: {url}", hint="sim://?replicas=2&decode=50")
    values: dict[str, str] = {}
    if model := unquote(parts.netloc + parts.path).strip("/") if parts.scheme else "":
        values["model"] = model
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        key = name.replace("-", "_")
        if key in values:
            raise JobError(
                f"simulated engine: option '{name}' is given twice", hint="write it once"
            )
        values[key] = value
    return SimConfig.of(values)


FAULT_KINDS = ("rate_429", "stall", "cut", "malformed", "disorder")
_RATES = {
    "rate_429": "rate_429",
    "stall": "stall_rate",
    "cut": "cut_rate",
    "malformed": "malformed_rate",
    "disorder": "disorder_rate",
}


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """The faults of one request; a 429 and a dead server exclude the others."""

    dead: bool = False
    limited: bool = False
    stall: bool = False
    cut: bool = False
    malformed: bool = False
    disorder: bool = False


NO_FAULT = InjectedFault()


class Faults:
    """Draws the faults of one replica, request by request.

    Draws depend only on the seed, the replica and the number of earlier requests, so that a run
    fails in the same places each time.

    Args:
        config: rates.
        seed: the fleet's seed.
        replica: number of the replica, from 0.
    """

    def __init__(self, config: FaultConfig, seed: int, replica: int) -> None:
        self.config = config
        self.counts: dict[str, int] = dict.fromkeys((*FAULT_KINDS, "overload", "dead"), 0)
        self.requests = 0
        self._draws = {
            kind: (rate, random.Random(f"{seed}/{replica}/{kind}"))
            for kind in FAULT_KINDS
            if (rate := getattr(config, _RATES[kind])) > 0
        }

    def next(self) -> InjectedFault:
        """Return the fault of the next generation request."""
        self.requests += 1
        if self.config.dead_after is not None and self.requests > self.config.dead_after:
            return InjectedFault(dead=True)
        if not self._draws:
            return NO_FAULT
        hit = {kind for kind, (rate, rng) in self._draws.items() if rng.random() < rate}
        if "rate_429" in hit:
            return InjectedFault(limited=True)
        return InjectedFault(
            stall="stall" in hit,
            cut="cut" in hit,
            malformed="malformed" in hit and "cut" not in hit,
            disorder="disorder" in hit,
        )

    def count(self, kind: str) -> None:
        """Count a fault that a client has met."""
        self.counts[kind] += 1
