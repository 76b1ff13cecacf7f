"""The backend: a name, a URL or a mapping."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import parse_qsl, unquote

from pydantic import Field, model_validator

from bagent.backend_kinds import TRAITS, BackendKind
from bagent.job.spec.paths import PathKind, ResolvedPath, resolve_path
from bagent.job.spec.types import (
    Choice,
    IntegerKind,
    Kind,
    Section,
    Text,
    TextList,
    TextMap,
    as_number,
    invalid,
)
from bagent.job.validation import LoadContext
from bagent.job.yaml.scalars import SourceText
from bagent.text.suggest import describe_value, nearest_name
from bagent.types import Json

ENGINES: frozenset[str] = frozenset(kind for kind, traits in TRAITS.items() if traits.port)
"""Kinds that a hostfile's endpoints may be of without a URL."""

NAMES: tuple[str, ...] = tuple(kind for kind in TRAITS if kind != "compatible")
"""The backends that have a name of their own."""

_SCHEMES = (*NAMES, "http", "https")
_WITH_TAIL = ENGINES | {"local", "sim", "http", "https"}
"""Schemes of URLs that name something; ``openai:MODEL`` names a model, which no URL does."""
Api = Literal["auto", "chat", "responses"]

_REGION = re.compile(r"[a-z]{2,}(-[a-z]+)+-[0-9]+")
_BEDROCK_OPTIONS = ("endpoint", "profile")
_HOST = re.compile(r"[\w.-]+")
_ROUTES = ("/chat/completions", "/completions", "/messages", "/responses")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed backend name or URL.

    ``base`` is ``http(s)://host[:port][/path]`` without a slash at its end, None where the kind
    knows its own address or has none. ``region`` is bedrock's. ``file`` is local's model file.
    ``options`` is the query of sim:, local: and bedrock: URLs, ``query`` that of all
    others. What the options of sim: may be is the simulator's matter.
    ``authorization`` is a header value made of ``user:password@`` in the URL.
    """

    kind: BackendKind
    text: str = field(compare=False)
    base: str | None = None
    region: str | None = None
    file: ResolvedPath | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    authorization: str | None = field(default=None, repr=False)

    @property
    def replicas(self) -> int:
        """How many simulated endpoints ``sim://?replicas=N`` asks for."""
        return int(self.options.get("replicas", "1"))


@dataclass(frozen=True)
class AddressKind(Kind):
    """A backend name or URL."""

    def read(self, value: Any, context: LoadContext | None) -> Address:
        """Return the address: a known name, or a URL with a known scheme."""
        if not isinstance(value, str):
            raise invalid(f"expected a backend's name or URL, got {describe_value(value)}")
        text = value.strip()
        if text in NAMES:
            return Address(_kind(text), str(text))
        scheme, separator, tail = text.partition("://")
        if not separator:
            raise _not_a_backend(text)
        engine, _, transport = scheme.lower().partition("+")
        if engine not in _SCHEMES or transport not in ("", "http", "https"):
            meant = nearest_name(engine, _SCHEMES)
            hint = f"did you mean {meant}://?" if meant else f"known: {' '.join(_SCHEMES)}"
            raise invalid(f"unknown scheme {scheme}://", hint)
        if engine == "bedrock":
            return _bedrock(text, tail)
        if engine == "local":
            return _local(value, tail, context)
        if engine == "sim":
            return Address("sim", text, options=_sim_options(tail.partition("?")[2]))
        return _http(text, engine, transport, tail)

    def dump(self, value: Any) -> Json:
        """Return the address as it was given; a model file by its whole path."""
        if value.file is not None:
            tail = "?" + "&".join(f"{key}={item}" for key, item in value.options.items())
            return f"local://{value.file.path}{tail if value.options else ''}"
        return value.text

    def describe(self) -> Json:
        """Return the known names, and URLs of the known schemes."""
        schemes = "|".join(_SCHEMES)
        text = {"type": "string", "pattern": rf"^({schemes})(\+https?)?://|\$\{{"}
        return {"anyOf": [{"enum": list(NAMES)}, text]}


@dataclass(frozen=True)
class Headers(TextMap):
    """HTTP headers: names are tokens, values hold no line ends."""

    def read(self, value: Any, context: LoadContext | None) -> Mapping[str, str]:
        """Return the headers, each name and value fit for the wire."""
        headers = super().read(value, context)
        for name, text in headers.items():
            if not _HEADER_NAME.fullmatch(name):
                raise invalid(f"{name} is no header name", key=name)
            if any(letter in text for letter in "\r\n\0") or not _is_latin(text):
                raise invalid(f"the value of header {name} holds characters not allowed", key=name)
        return headers


@dataclass(frozen=True)
class ProxyKind(Kind):
    """A proxy's URL, or ``none`` for never a proxy."""

    def read(self, value: Any, context: LoadContext | None) -> str:
        """Return the proxy as ``http://HOST:PORT``, a login before it kept, or ``none``."""
        text = value.strip() if isinstance(value, str) else ""
        if text == "none":
            return text
        scheme, mark, tail = text.partition("://")
        if not mark:
            raise invalid(f"expected http://HOST:PORT or none, got {describe_value(value)}")
        if scheme.lower() not in ("http", "https"):
            raise invalid(f"a proxy speaks http or https, not {scheme}", "http://HOST:PORT")
        login, _, netloc = tail.rstrip("/").rpartition("@")
        return f"{scheme.lower()}://{login + '@' if login else ''}{host_and_port(netloc, None)}"

    def describe(self) -> Json:
        """Return a URL of http or https, or ``none``."""
        return {"type": "string", "pattern": r"^https?://|^none$|\$\{"}


class BackendRef(Section):
    """The server that answers, and how to reach it."""

    misplaced: ClassVar[Mapping[str, str]] = {
        "api_key": "keep keys out of job files: api_key_env: NAME",
        "base_url": "did you mean url?",
        "kind": "the kind is the URL's scheme: url: vllm://HOST:PORT",
        "timeout": "it belongs to limits: {timeout: ...}",
    }
    short_form: ClassVar[list[Json]] = [AddressKind().describe()]

    url: Annotated[Address | None, AddressKind()] = Field(
        default=None,
        description="A name or a URL.",
        examples=["vllm://host:8000", "https://api.example.org/v1"],
    )
    api: Annotated[Api, Choice(Api)] = Field(
        default="auto",
        description="Which API carries calls: OpenAI's chat completions or responses; auto takes"
        " chat, and responses for models that need them.",
    )
    api_key_env: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="The environment variable that holds the API key."
    )
    api_key_command: Annotated[tuple[str, ...], TextList(least=1)] = Field(
        default=(),
        description="A program that prints the API key: one text for a shell, or its argv.",
    )
    headers: Annotated[Mapping[str, str], Headers()] = Field(
        default_factory=dict, description="Further HTTP headers.", repr=False
    )
    query: Annotated[Mapping[str, str], TextMap()] = Field(
        default_factory=dict, description="Query parameters added to every request.", repr=False
    )
    ca_file: Annotated[ResolvedPath | None, PathKind()] = Field(
        default=None, description="PEM file of the certificate authorities to trust."
    )
    proxy: Annotated[str | None, ProxyKind()] = Field(
        default=None,
        description="URL of the proxy to use, or none; blank: as the environment says.",
    )

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand a text to the URL."""
        return {"url": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _check_api(self) -> BackendRef:
        if self.api != "auto" and TRAITS[self.kind].protocol != "openai":
            raise invalid(
                f"backend {self.kind} has an API of its own",
                "api is for OpenAI and servers like it",
                key="api",
            )
        return self

    @model_validator(mode="after")
    def _one_key(self) -> BackendRef:
        if self.api_key_env and self.api_key_command:
            raise invalid(
                "api_key_env and api_key_command exclude each other", key="api_key_command"
            )
        return self

    @property
    def kind(self) -> BackendKind:
        """The kind of the address; ``compatible`` where there is none."""
        return self.url.kind if self.url else "compatible"

    @property
    def base(self) -> str | None:
        """The address's ``base``."""
        return self.url.base if self.url else None

    @property
    def all_query(self) -> Mapping[str, str]:
        """The URL's own query parameters and those of ``query``."""
        return {**(self.url.query if self.url else {}), **self.query}

    @property
    def all_headers(self) -> Mapping[str, str]:
        """``headers``, and the URL's user and password unless they name an Authorization."""
        login = self.url.authorization if self.url else None
        named = any(name.lower() == "authorization" for name in self.headers)
        headers = {name: value.strip() for name, value in self.headers.items()}
        return {"Authorization": login, **headers} if login and not named else headers

    def without_url(self) -> BackendRef:
        """Return the same, with the kind only: a hostfile gives the addresses."""
        kind = Address(self.kind, self.kind) if self.kind != "compatible" else None
        return self.model_copy(update={"url": kind})


def host_and_port(netloc: str, default: int | None) -> str:
    """Return ``netloc`` checked, with the ``default`` port added where it has none.

    Raises:
        PydanticCustomError: no host, a host that is none, or a port out of 1..65535.
    """
    match = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(?::([^:]*))?", netloc)
    if not match:
        raise invalid(f"{netloc} is no host", "an IPv6 address stands in brackets: [::1]:8000")
    host, port = match[1], match[2]
    if not host:
        raise invalid("the URL names no host", "write vllm://localhost:8000")
    if host.startswith("["):
        _check_ipv6(host)
    elif not _HOST.fullmatch(host):
        raise invalid(f"{host} is no host name")
    if port is None:
        return f"{host}:{default}" if default else host
    if not (port.isascii() and port.isdigit()):
        raise invalid(f"port {port or '(empty)'} is no number")
    if not 1 <= int(port[:9]) <= 65535:
        raise invalid(f"port {port} is not between 1 and 65535")
    return f"{host}:{int(port)}"


def _check_ipv6(host: str) -> None:
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        raise invalid(f"{host} is no IPv6 address") from None


def _kind(name: str) -> BackendKind:
    kinds: dict[str, BackendKind] = {kind: kind for kind in TRAITS}
    return kinds[name]


def _not_a_backend(text: str) -> Any:
    scheme, colon, rest = text.partition(":")
    engine, rest = scheme.lower().partition("+")[0], rest.lstrip("/")
    # A port makes the first word a host: `vllm:8000` is a server in the same network.
    if colon and engine in _WITH_TAIL and not re.match(r"[0-9]+(/|$)", rest):
        return invalid(f"{text} lacks the two slashes of a URL", f"write {_url(scheme, rest)}")
    if re.fullmatch(r"(\[.*\]|[\w.-]+):[0-9]+(/.*)?", text) or "." in text or "/" in text:
        return invalid(f"{text} is neither a backend's name nor a URL", f"write vllm://{text}")
    meant = nearest_name(text, NAMES)
    hint = f"did you mean {meant}?" if meant else f"known: {' '.join(NAMES)}, or a URL"
    return invalid(f"unknown backend {text}", hint)


def _url(scheme: str, rest: str) -> str:
    """Return an example of a URL, with an engine's usual port if there is none."""
    port = TRAITS[_kind(scheme)].port if scheme in NAMES else None
    has_port = port is None or re.search(r"[:/?]", rest)
    return f"{scheme}://{rest or 'HOST'}" + ("" if has_port else f":{port}")


def _bedrock(text: str, address: str) -> Address:
    region, _, query = address.partition("?")
    region, options = region.rstrip("/"), _pairs(query)
    for name in options:
        if name not in _BEDROCK_OPTIONS:
            raise invalid(f"bedrock has no option {name}", f"known: {' '.join(_BEDROCK_OPTIONS)}")
    if not region:
        return Address("bedrock", text, options=options)
    if not _REGION.fullmatch(region):
        raise invalid(f"{region} is no AWS region", "write bedrock://us-east-1")
    return Address("bedrock", text, region=region, options=options)


def _local(value: str, address: str, context: LoadContext | None) -> Address:
    name, _, query = address.partition("?")
    options = _pairs(query)
    if not name:
        return Address("local", str(value), options=options)
    from_command = isinstance(value, SourceText) and value.from_command
    file = resolve_path(SourceText.of(name, from_command=from_command), context)
    return Address("local", str(value), file=file, options=options)


def _http(text: str, engine: str, transport: str, address_text: str) -> Address:
    if re.search(r"[\s\x00-\x1f]", text):
        raise invalid("a URL holds no blanks")
    if "#" in address_text:
        raise invalid("a backend's URL has no #fragment")
    address_text, _, query = address_text.partition("?")
    netloc, slash, path = address_text.partition("/")
    login, _, host = netloc.rpartition("@")
    kind = _kind("compatible" if engine in ("http", "https") else engine)
    address = Address(kind, text, query=_pairs(query))
    traits = TRAITS[kind]
    if not netloc and not path and traits.address is not None:
        return address
    scheme = transport or ("https" if engine == "https" or traits.address else "http")
    port = None if transport == "https" else traits.port
    base = f"{scheme}://{host_and_port(host, port)}{slash}{path}".rstrip("/")
    for route in _ROUTES:
        base = base.removesuffix(route)
    return replace(address, base=base, authorization=_basic(login) if login else None)


def _sim_options(tail: str) -> Mapping[str, str]:
    options = _pairs(tail)
    if "replicas" in options:
        number = as_number(SourceText.of(options["replicas"], from_variable=True))
        if number is None:
            raise invalid(
                f"replicas: expected a whole number, got {describe_value(options['replicas'])}"
            )
        count = IntegerKind(1, 10_000).read(number, None)
        options = {**options, "replicas": str(count)}
    return options


def _pairs(tail: str) -> Mapping[str, str]:
    pairs: dict[str, str] = {}
    for key, value in parse_qsl(tail, keep_blank_values=True):
        if key in pairs:
            raise invalid(f"{key} stands twice in the URL")
        pairs[key] = value
    return pairs


def _basic(login: str) -> str:
    return "Basic " + base64.b64encode(unquote(login).encode()).decode("ascii")


def _is_latin(text: str) -> bool:
    return all(ord(letter) < 256 for letter in text)
