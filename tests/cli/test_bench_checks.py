"""What ``bagent bench`` refuses before it sends anything."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from bagent.bench.plan import BenchPlan
from bagent.bench.runner import make_folder
from bagent.cli.app import main
from bagent.cli.commands.bench_options import check_options
from bagent.cli.render.bench import ENDPOINTS, ENDPOINTS_SPARE, print_table
from bagent.errors import UsageError


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rate", "5.."], "--rate 5..: not a ramp (such as --rate 2..20)"),
        (["--rate", "1,nan"], "--rate 1,nan: not numbers above 0"),
        (["--routing", "spread,balanced"], "--routing: balanced twice"),
        (["--prefix-tokens", "9", "--skew", "inf"], "--skew inf: not a number"),
        (["--rate", "inf"], "--rate inf: too much"),
        (["--concurrency", "99999999"], "--concurrency 99999999: too much (below 10,000,000)"),
        (["--concurrency", "1,8,1"], "--concurrency: 1 twice (write it once; --repeats N sends "),
        (["--arrival", "gamma", "--rate", "5", "--burstiness", "nan"], "--burstiness nan: not"),
        (["--arrival", "gamma", "--rate", "5", "--burstiness", "0"], "--burstiness 0: not above 0"),
        (["--workers", "100000"], "--workers 100000: more processes than this machine can run"),
        (["--write-hostfile", "none/good"], "--write-hostfile none/good: no folder none (make it"),
        (["--write-hostfile", "."], "--write-hostfile .: this is a folder (name a file)"),
        (["--as", "mail"], "--as mail: unknown (chat, completions, list, chat-batch)"),
        (["--routing", "affinity"], "--routing affinity needs groups (give --prefix-tokens N)"),
        (["--prefix-tokens", "300"], "--prefix-tokens 300: not below the 256 input tokens"),
        (["--slo", "tftt=1s"], "--slo tftt=1s: unknown"),
        (["--compare", "none"], "none: --compare: cannot be read"),
        (["--job", "none.yaml"], "none.yaml"),
        (["--replay", "none"], "none: no such run"),
        (["--speed", "2"], "--speed needs a replay (give --replay RUN or FILE)"),
        (["--turns", "2", "--as", "list"], "--turns does not go with --replay, --job, lists and"),
        (["--fail-if", "rps<-5%"], "there is nothing to compare with (give --compare OLD)"),
        (["--sweep", "--rate", "5"], "--sweep finds its loads by itself: no --rate"),
        (["--sweep", "--routing", "isolated"], "--sweep loads the whole fleet"),
        (["--list-size", "4"], "--list-size does nothing without --as list or chat-batch"),
        (["--arrival", "constant"], "--arrival does nothing without --rate R or --sweep"),
        (["--fail-if", "best_rate<3"], "--fail-if best_rate<3: not known without --sweep"),
        (["--fail-if", "conversations_s<1"], "not known without --turns N"),
        (["--fail-if", "rps_median<1"], "not known without --repeats N"),
        (["--requests", "9", "--fail-if", "ttft_p99_ms>5"], "not measured with fewer than 100"),
    ],
)
def test_what_cannot_be_done_is_one_line(args, words, capsys):
    """It is found before the hostfile is read, and so before anything is sent."""
    assert main(["bench", "--hostfile", "none", *args]) == 2
    found = capsys.readouterr().err
    assert words in found and len(found.splitlines()) == 1


def test_a_load_beside_a_replay_has_an_end(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input_tokens,output_tokens\n1,50,3\n")
    args = ["bench", "--hostfile", "none", "--replay", str(trace), "--concurrency", "2"]
    assert main(args) == main([*args, "--duration", "9s"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "a load beside --replay needs an end (give --duration or --requests)" in first
    assert "none: the hostfile cannot be read" in second


@pytest.mark.parametrize(
    "args",
    [
        ["--turns", "2", "--think", "0s"],
        ["--sweep", "--fail-if", "best_rate<3"],
        ["--duration", "9s", "--fail-if", "ttft_p99_ms>5", "--write-hostfile", "good"],
        ["--rate", "2,5,2..5", "--warmup", "0"],
    ],
)
def test_what_can_be_done_comes_as_far_as_the_hostfile(args, capsys):
    assert main(["bench", "--hostfile", "none", *args]) == 2
    assert "none: the hostfile cannot be read" in capsys.readouterr().err
    assert main(["bench", *args]) == 2
    no_hosts = "no hostfile (give --hostfile FILE, or --backend NAME, or set BAGENT_HOSTFILE)"
    assert no_hosts in capsys.readouterr().err


def test_a_folder_with_another_load_test_is_refused(tmp_path):
    folder = tmp_path / "load test"
    folder.mkdir()
    (folder / "requests-0.jsonl").touch()
    with pytest.raises(UsageError, match=r"\(name another: -o '.*/load test-2'\)"):
        make_folder(folder)


def test_numbers_that_are_none_are_refused_wherever_they_come_from():
    names = "groups skew think turn_tokens list_size arrival burstiness sweep job replay"
    given = dict.fromkeys(names.split())
    check_options(given, BenchPlan())
    with pytest.raises(UsageError, match="--burstiness inf"):
        check_options(given, BenchPlan(burstiness=float("inf")))


COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Screen(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


ROWS = [
    {
        "endpoint": f"node{n:04d}.cluster:8000",
        "verdict": verdict,
        "speed": 1.0,
        "requests": 120,
        "ok_share": 1.0,
        "rps": 3.25,
        "output_tok_s": 207.5,
        "ttft_p50_ms": 103.4,
        "tpot_p50_ms": 21.8,
        "in_flight_mean": 7.9,
        "share": 1.0,
        "reason": reason,
    }
    for n, (verdict, reason) in enumerate([("ok", ""), ("slow", "0.10 times as fast as others")])
]


@pytest.mark.parametrize("width", [80, 100, 140, 220])
def test_a_table_is_as_wide_as_the_screen_at_most_and_names_are_whole(monkeypatch, width):
    screen = Screen()
    monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.redirect_stdout(screen):
        left = print_table(ENDPOINTS, ROWS, ENDPOINTS_SPARE)
    lines = COLOUR.sub("", screen.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    for row in ROWS:
        assert sum(str(row["endpoint"]) in line for line in lines) == 1
    assert ("reason" in left) == (width < 140)
    assert "verdict" not in left and "out tok/s" not in left


def test_in_a_pipe_every_column_with_a_value_is_there(capsys):
    assert print_table(ENDPOINTS, ROWS, ENDPOINTS_SPARE) == []
    head, _, first, *_ = capsys.readouterr().out.splitlines()
    assert "TTFT p50 ms" in head and "reason" in head
    assert "hit %" not in head  # no endpoint told it
    assert first.startswith("node0000.cluster:8000")
