"""``bagent bench``: the load test of a fleet."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backend_kinds import TRAITS
from bagent.backends.endpoint import Endpoint
from bagent.cli import options as opt
from bagent.cli.commands import bench_options as bench_opt
from bagent.cli.commands.hosts import HostsFile, one_hostfile
from bagent.errors import EXIT_CLIENT_LIMITED, EXIT_ROWS_FAILED, EXIT_STOPPED, UsageError
from bagent.servers.hosted import MOST_THREADS
from bagent.servers.resolve import Servers, resolve_backend

if TYPE_CHECKING:
    from bagent.bench.plan import BenchPlan
    from bagent.bench.schedule import Recorded
    from bagent.cli.commands.hosts import HostfileInput
    from bagent.runs.context import RunContext


def bench(
    hosts: HostsFile = None,
    hostfile: opt.Hostfile = None,
    backend: opt.Backend = None,
    model: opt.Model = None,
    preset: bench_opt.Preset = None,
    concurrency: bench_opt.Concurrency = None,
    rate: bench_opt.Rate = None,
    sweep: bench_opt.Sweep = False,
    replay: bench_opt.Replay = None,
    speed: bench_opt.Speed = None,
    arrival: bench_opt.Arrival = None,
    burstiness: bench_opt.Burstiness = None,
    requests: bench_opt.Requests = None,
    seconds: bench_opt.Seconds = None,
    input_tokens: bench_opt.InputTokens = None,
    output_tokens: bench_opt.OutputTokens = None,
    prefix_tokens: bench_opt.PrefixTokens = None,
    groups: bench_opt.Groups = None,
    turns: bench_opt.Turns = None,
    think: bench_opt.Think = None,
    turn_tokens: bench_opt.TurnTokens = None,
    skew: bench_opt.Skew = None,
    ways: bench_opt.Ways = None,
    list_size: bench_opt.ListSize = None,
    routing: bench_opt.Routing = None,
    job: bench_opt.Job = None,
    warmup: bench_opt.Warmup = None,
    repeats: bench_opt.Repeats = None,
    seed: bench_opt.Seed = None,
    workers: bench_opt.Workers = None,
    slo: bench_opt.Slo = None,
    timeout: bench_opt.Timeout = None,
    output: bench_opt.Output = None,
    write_hostfile: bench_opt.WriteHostfile = None,
    compare: bench_opt.Compare = None,
    fail_if: bench_opt.FailIf = None,
    as_json: opt.AsJson = False,
    debug: opt.Debug = False,
) -> int:
    """Load-test a fleet, endpoint by endpoint.

    Every ready endpoint gets load at the same time, and a verdict: ok, slow, failing or dead. DIR
    holds summary.json, report.html, CSV, Parquet, DuckDB and the raw rows. --backend and --model
    test one server, also a hosted one, which costs money.

    Exit codes: 0 measured; 1 a --fail-if holds, or no request ended well; 2 an option or a file
    is wrong; 3 the client was the limit; 75 stopped early, the report holds what there is.

    Example: bagent bench --hostfile nodes.txt --preset quick --write-hostfile good.hosts

    Example: bagent bench --hostfile nodes.txt --replay runs/review --speed 1,2
    """
    hostfile = one_hostfile(hosts, hostfile)
    # All local names are options.
    return _bench(dict(locals()))


def _bench(options: dict[str, Any]) -> int:
    from bagent.bench.plan import load_names
    from bagent.bench.runner import BenchRequest, make_folder, send_all, write_results
    from bagent.bench.thresholds import check_rules, check_rules_known, read_rule, read_summary
    from bagent.cli.commands.bench_options import check_writable
    from bagent.cli.commands.hosts import read_fleet
    from bagent.cli.render.bench import print_end
    from bagent.job.redaction import mask_command
    from bagent.report.load_test import page

    trace, plan = _trace_and_plan(options)
    rules = [read_rule(text) for text in options["fail_if"] or ()]
    old = read_summary(options["compare"]) if options["compare"] else None
    check_rules(rules, load_names(plan), compared=old is not None)
    check_rules_known(rules, plan)
    if options["write_hostfile"] is not None:
        check_writable(options["write_hostfile"])
    job, hostfile = _job(options)
    servers = named_backend(options) if options["backend"] else None
    fleet = None if servers else read_fleet(hostfile, "give --hostfile FILE, or --backend NAME")
    folder = options["output"] or Path("bench") / time.strftime("%Y%m%d-%H%M%S")
    make_folder(folder)
    request = BenchRequest(
        plan=plan,
        endpoints=servers.endpoints if servers else fleet.endpoints if fleet else (),
        servers=servers,
        folder=folder,
        model=options["model"],
        trace=trace,
        command=mask_command(["bagent", *sys.argv[1:]]),
    )
    began = time.monotonic()

    def log(message: str) -> None:
        from bagent.observe.formatting import duration, visible

        sys.stderr.write(f"[{duration(time.monotonic() - began)}] {visible(message)}\n")
        sys.stderr.flush()

    with contextlib.ExitStack() as stack:
        if servers is not None:
            servers = stack.enter_context(reachable(servers, plan, log))
            request = msgspec.structs.replace(request, servers=servers, endpoints=servers.endpoints)
        endpoints, record = send_all(request, job, log)
    try:
        summary = write_results(request, endpoints, record, partial(page, old=old))
    except RuntimeError as error:
        if "interrupted" not in str(error).lower():
            raise
        raise KeyboardInterrupt from None  # DuckDB turns Ctrl-C into this error
    written = _write_good(options["write_hostfile"], summary, fleet, log)
    broken = print_end(summary, folder, rules, old, written, as_json=options["as_json"])
    return _exit_code(summary, broken)


def _write_good(
    path: Path | None,
    summary: dict[str, Any],
    fleet: HostfileInput | None,
    log: Callable[[str], None],
) -> Path | None:
    """Write the endpoints that are ok; return the path, or None where nothing is written."""
    good = {endpoint["url"] for endpoint in summary["endpoints"] if endpoint["verdict"] == "ok"}
    if path is None or fleet is None:
        return None
    if not good:
        log(f"no endpoint is ok: {path} is not written")
        return None
    from bagent.fleet.hostfile import hostfile_text, write_hostfile

    text = hostfile_text(fleet.hosts, good, fleet.text)
    write_hostfile(path, f"{_CLIENT_LIMITED}{text}" if summary["client_limited"] else text)
    return path


_CLIENT_LIMITED = (
    "# The client was the limit of the load test. Endpoints that were dead, failing or far slower\n"
    "# than the others are left out; some of these may be slow too.\n"
)
"""What a hostfile says of its endpoints where the client was the limit."""


def _exit_code(summary: dict[str, Any], broken: Sequence[str]) -> int:
    if summary["client_limited"]:
        return EXIT_CLIENT_LIMITED
    if summary["stopped"]:
        return EXIT_STOPPED
    nothing = not any(endpoint["ok"] for endpoint in summary["endpoints"])
    return EXIT_ROWS_FAILED if broken or nothing else 0


def _job(options: dict[str, Any]) -> tuple[RunContext | None, str | None]:
    """Return the checked job of ``--job``, and the hostfile: the option's, else the job's."""
    if options["job"] is None:
        return None, options["hostfile"]
    from bagent.bench.workload import prepare_job

    job = prepare_job(options["job"], os.environ, Path.cwd())
    job_hostfile = job.job.hostfile.path if job.job.hostfile is not None else None
    return job, options["hostfile"] or (str(job_hostfile) if job_hostfile else None)


_PLAIN = (
    "sweep",
    "arrival",
    "burstiness",
    "requests",
    "input_tokens",
    "output_tokens",
    "prefix_tokens",
    "groups",
    "skew",
    "turns",
    "turn_tokens",
    "list_size",
    "warmup",
    "repeats",
    "seed",
    "workers",
)
MOST = 10_000_000
"""Calls in flight and requests a second stay below it."""

_WAYS = ("chat", "completions", "list", "chat-batch")
_ROUTINGS = ("balanced", "least-inflight", "affinity", "as-run", "isolated")


def _trace_and_plan(options: dict[str, Any]) -> tuple[list[Recorded], BenchPlan]:
    """Return the recorded load of ``--replay`` and the plan that the options make."""
    if options["replay"] is None:
        if options["speed"]:
            raise UsageError("--speed needs a replay", hint="give --replay RUN or FILE")
        return [], _plan(options, {})
    from bagent.bench.schedule import read_trace

    speeds = tuple(_numbers("--speed", options["speed"] or "1", float))
    trace, info = read_trace(options["replay"])
    return trace, _plan(options, {"trace": info, "speeds": speeds})


def _plan(options: dict[str, Any], extra: dict[str, Any]) -> BenchPlan:
    """Make the plan of the options.

    Raises:
        UsageError: one of them is wrong.
    """
    from bagent.backends.base import Timeouts
    from bagent.bench.plan import make_plan
    from bagent.cli.commands.bench_options import check_options

    # An absent flag is False; 0 is a number.
    plain = {name: options[name] for name in _PLAIN if options[name] is not None}
    values = {name: value for name, value in plain.items() if value is not False} | extra
    if options["concurrency"]:
        values["concurrency"] = tuple(_numbers("--concurrency", options["concurrency"], int))
    if options["rate"]:
        parts = _once_each("--rate", options["rate"].split(","))
        even = [part for part in parts if ".." not in part]
        values["rates"] = tuple(_numbers("--rate", ",".join(even), float)) if even else ()
        values["ramps"] = tuple(_ramp(part) for part in parts if ".." in part)
    if options["think"]:
        values["think"] = _duration("--think", options["think"], none_too=True)
    if options["seconds"]:
        values["seconds"] = _duration("--duration", options["seconds"])
    if options["ways"]:
        values["ways"] = _names("--as", options["ways"], _WAYS)
    if options["job"] is not None:
        values["ways"] = ("job",)
    if options["routing"]:
        text = options["routing"].replace("spread", "balanced")
        values["routings"] = _names("--routing", text, _ROUTINGS)
    if options["slo"]:
        values["slo"] = _slo(options["slo"])
    if options["timeout"]:
        total = _duration("--timeout", options["timeout"])
        values["timeouts"] = Timeouts(
            connect=min(5.0, total), first_token=total, idle=total, total=total
        )
    plan = make_plan(options["preset"], values)
    check_options(options, plan)
    return plan


def _numbers(option: str, text: str, kind: type[Any]) -> list[Any]:
    """Read numbers above 0, separated by commas."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(number > 0 for number in numbers):
        raise UsageError(f"{option} {text}: not numbers above 0", hint=f"such as {option} 1,8,64")
    if not all(number < MOST for number in numbers):
        raise UsageError(f"{option} {text}: too much", hint=f"below {MOST:,}")
    return _once_each(option, numbers)


def _once_each(option: str, values: list[Any]) -> list[Any]:
    for value in values:
        if values.count(value) > 1:
            raise UsageError(
                f"{option}: {value} twice",
                hint="write it once; --repeats N sends every load N times",
            )
    return values


def _ramp(text: str) -> tuple[float, float]:
    """Read the two rates of ``2..20``."""
    try:
        low, high = map(float, text.split("..", 1))
    except ValueError:
        low = high = 0.0
    if not (0 < low < MOST and 0 < high < MOST):
        raise UsageError(f"--rate {text}: not a ramp", hint="such as --rate 2..20")
    return low, high


def _names(option: str, text: str, choices: Sequence[str]) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in choices:
            raise UsageError(f"{option} {name}: unknown", hint=", ".join(choices))
    return tuple(_once_each(option, list(names)))


def _duration(option: str, text: str, *, none_too: bool = False) -> float:
    from bagent.text.durations import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = -1.0
    if seconds < 0 or (seconds == 0 and not none_too):
        raise UsageError(f"{option} {text}: not a duration", hint="write 30s, 5m or 1h30m")
    return seconds


def _slo(text: str) -> Any:
    """Read ``ttft=2s,tpot=100ms,e2e=30s``; what is not named has no limit."""
    from bagent.bench.plan import Slo

    limits: dict[str, float | None] = {"ttft": None, "tpot": None, "e2e": None}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in limits:
            raise UsageError(f"--slo {part}: unknown", hint="ttft=2s,tpot=100ms,e2e=30s")
        limits[name.strip()] = 1000 * _duration("--slo", value)
    return Slo(**limits)


def named_backend(options: dict[str, Any]) -> Servers:
    """Resolve ``--backend`` to a server that speaks OpenAI's protocol; see :func:`reachable`.

    Anthropic serves it at ``/v1/chat/completions``, with the key as a bearer token
    (https://docs.claude.com/en/api/openai-sdk).

    Raises:
        UsageError: the server cannot be loaded this way, or options contradict each other.
    """
    for name, option in (("hostfile", "--hostfile"), ("write_hostfile", "--write-hostfile")):
        if options[name] is not None:
            raise UsageError(f"--backend and {option} exclude each other", hint="leave one out")
    servers = resolve_backend(options["backend"], options["model"], os.environ)
    traits = TRAITS[servers.kind]
    if traits.protocol == "openai" or not traits.serves_chat_completions:
        return servers
    provider = servers.kind.capitalize()
    sys.stderr.write(f"note: {provider} is loaded by its OpenAI-compatible route\n")
    endpoints = [_with_bearer(endpoint, traits.key_header) for endpoint in servers.endpoints]
    return msgspec.structs.replace(servers, kind="openai", endpoints=endpoints)


@contextmanager
def reachable(servers: Servers, plan: BenchPlan, log: Callable[[str], None]) -> Iterator[Servers]:
    """Yield a server that speaks OpenAI's protocol: where needed, a bridge in this process."""
    if TRAITS[servers.kind].serves_chat_completions:
        yield servers
        return
    from bagent.proxy.chat_bridge import bridged_apart

    client = "a client" if servers.bedrock is None else "boto3"
    log(
        f"{servers.kind.capitalize()} is loaded through {client} in this process: what that takes"
        " counts as the server's"
    )
    if servers.bedrock is not None:
        threads = max(servers.bedrock.threads, *plan.concurrency, 1)
        bedrock = msgspec.structs.replace(servers.bedrock, threads=min(threads, MOST_THREADS))
        servers = msgspec.structs.replace(servers, bedrock=bedrock)
    with bridged_apart(servers, log, plan.timeouts) as reachable_servers:
        yield reachable_servers


def _with_bearer(endpoint: Endpoint, key_header: str | None) -> Endpoint:
    key = endpoint.headers.get(key_header or "")
    if key is None:
        return endpoint
    headers = {"Authorization": f"Bearer {key}", **endpoint.headers}
    return msgspec.structs.replace(endpoint, headers=headers)
