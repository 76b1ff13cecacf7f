"""How many of 100 small faults the test suite notices, and which lines and branches it runs.

::

    cd CHECKOUT
    .venv/bin/python benchmarks/mutants.py make                  # choose the mutants anew
    .venv/bin/python benchmarks/mutants.py reach --tests-dir tests --out REACH [--coverage]
    .venv/bin/python benchmarks/mutants.py run --tests-dir tests --out RESULT

``reach`` runs the suite once, one test at a time, and notes which tests get to which mutant, what
each test costs in CPU seconds and, with ``--coverage`` (``pip install coverage``), the lines and
branches of ``bagent/`` that run, processes that tests start included. ``run`` does that first
without ``--reach`` (the file is then ``RESULT-reach.json``; where it is there it is used). Then it
applies one mutant after the other to the checkout and runs the tests that get to it, cheap and
specific ones first, as many as ``--cap`` CPU seconds allow. The checkout is restored whatever
happens. Both go on where they were stopped when they are called again with the same ``--out``.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import marshal
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import mutants_sites as sites
import pytest

FOLDER = Path(__file__).resolve().parent
MUTANTS = FOLDER / "mutants.json"
SEED = 15
LEAST_TIMEOUT = 20.0
"""Seconds after which a test under a mutant counts as hanging, at least."""
TIMES_AS_LONG = 6.0
"""How many times its usual time a test may take before it counts as hanging."""
FIRST_TESTS = 25
"""How many tests run first, since few files are collected faster than all."""
SAVE_EVERY = 200
"""After so many tests what was covered so far is saved, in case the pass does not end well."""
ELSEWHERE = 3.0
"""By how much a test of another package than the mutant's counts as less specific."""


class Recorder:
    """A pytest plugin: tells other processes which test is going on, and notes its cost."""

    def __init__(self, work: Path) -> None:
        self.current = os.open(work / "current", os.O_WRONLY)
        self.log = (work / "tests.jsonl").open("a+", buffering=1)
        self.log.seek(0)
        self.done = {json.loads(line)["test"] for line in self.log}
        self.number = len(self.done)

    @pytest.hookimpl(trylast=True)  # after the suite's own order
    def pytest_collection_modifyitems(self, config, items):
        items[:] = [item for item in items if item.nodeid not in self.done]
        folders = config.args
        inside = {item: [arg for arg in folders if item.nodeid.startswith(arg)] for item in items}
        items.sort(key=lambda item: folders.index(max(inside[item], key=len, default=folders[0])))

    def pytest_runtest_protocol(self, item, nextitem):
        self.number += 1
        self.outcome = "passed"
        self.began = time.monotonic(), _cpu()
        os.pwrite(self.current, b"%8d" % self.number, 0)

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed" and self.outcome != "failed":
            self.outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid):
        wall, cpu = time.monotonic() - self.began[0], _cpu() - self.began[1]
        test = {"n": self.number, "test": nodeid, "outcome": self.outcome}
        test |= {"cpu": round(cpu, 3), "wall": round(wall, 3)}
        self.log.write(json.dumps(test) + "\n")
        os.pwrite(self.current, b"%8d" % 0, 0)
        if self.number % SAVE_EVERY == 0 and "coverage" in sys.modules:
            sys.modules["coverage"].Coverage.current().save()


class Selection:
    """A pytest plugin: runs the tests listed in a file in that order, and notes what fails."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.timeouts = json.loads(file.read_text())
        self.order = {test: i for i, test in enumerate(self.timeouts)}
        self.result = {"ran": 0, "failed": []}

    @pytest.hookimpl(trylast=True)  # after the suite's own order
    def pytest_collection_modifyitems(self, config, items):
        dropped = [item for item in items if item.nodeid not in self.order]
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])
        for item in items:
            item.add_marker(pytest.mark.timeout(self.timeouts[item.nodeid]), append=False)
        config.hook.pytest_deselected(items=dropped)

    def pytest_collectreport(self, report):
        if report.failed:
            self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report):
        self.result["ran"] += getattr(report, "when", "") == "setup"
        if report.failed:
            self.result["failed"].append(report.nodeid)
            self.result["why"] = str(report.longrepr)[-300:]
        self.file.with_suffix(".result").write_text(json.dumps(self.result))


def _cpu() -> float:
    return sum(os.times()[:4])


def load_mutants() -> list[sites.Mutant]:
    """Read the mutants that are kept beside this script."""
    return [sites.Mutant(**mutant) for mutant in json.loads(MUTANTS.read_text())]


def pytest_command(plugin: str, argument: Path, args: list[str]) -> list[str]:
    """Return a command that runs pytest in one process with a plugin of this script."""
    usual = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header"]
    return [sys.executable, __file__, "_pytest", plugin, str(argument), *usual, *args]


def run_pytest(plugin: str, argument: str, args: list[str]) -> int:
    """Run pytest in this process, which ``pytest_command`` began."""
    sys.path.remove(str(FOLDER))  # as `pytest` alone would have it
    kind = {"record": Recorder, "select": Selection}[plugin]
    return int(pytest.main(args, plugins=[kind(Path(argument))]))


# --- which tests get to which mutant ---------------------------------------------------------


def prepare(root: Path, work: Path, mutants: list[sites.Mutant]) -> list[int]:
    """Compile the modules with a call at each mutant's statement; return those not located."""
    shutil.rmtree(work / "code", ignore_errors=True)
    for name in ("code", "reached", "coverage"):
        (work / name).mkdir(parents=True, exist_ok=True)
    (work / "current").write_bytes(b"%8d" % 0)
    calls: dict[Path, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    unplaced = []
    for mutant in mutants:
        placed = sites.locate(root, mutant)
        if placed is None:
            unplaced.append(mutant.number)
        else:
            calls[placed.path][placed.line, placed.column].append(mutant.number)
    for path, numbers in calls.items():
        tree = ast.parse(path.read_bytes())
        for node in list(ast.walk(tree)):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list):
                    setattr(node, field, list(_with_calls(body, numbers)))
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        code = compile(ast.fix_missing_locations(tree), str(path), "exec")
        (work / "code" / name).write_bytes(marshal.dumps(code))
    return unplaced


def _with_calls(body: list[ast.stmt], numbers: dict[tuple[int, int], list[int]]):
    for statement in body:
        for number in numbers.get((statement.lineno, statement.col_offset), ()):
            call = ast.parse(f"__mutant_reached__({number})").body[0]
            for node in ast.walk(call):
                # On the statement's own line, so that no line or branch is added.
                ast.copy_location(node, statement)
            yield call
        yield statement


def reach(args: argparse.Namespace, out: Path) -> None:
    """Run the suite once and write what its tests cost and get to."""
    root, mutants = Path.cwd(), load_mutants()
    work = out.resolve().with_suffix(".work")
    unplaced = prepare(root, work, mutants)
    if args.coverage:
        lines = ["[run]", "branch = true", "parallel = true", "patch = _exit"]
        lines += [f"data_file = {work}/coverage/data", f"include = {root}/bagent/*"]
        lines += ["disable_warnings = no-data-collected,module-not-imported,couldnt-parse"]
        (work / "coverage.ini").write_text("\n".join(lines) + "\n")
    hook = Path(sysconfig.get_paths()["purelib"]) / "bagent_mutants.pth"
    script = str(FOLDER / "mutants_hook.py")
    hook.write_text(f"import sys; exec(open({script!r}).read(), {{'WORK': {str(work)!r}}})\n")
    try:
        command = pytest_command("record", work, [*args.tests_dir, f"--timeout={args.timeout}"])
        with (work / "output").open("ab") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    finally:
        hook.unlink()
    result = {"commit": commit(), "tests_dir": args.tests_dir, "unplaced": unplaced}
    result |= gather(work)
    if args.coverage:
        result["coverage"] = coverage_of(root, work)
    out.write_text(dump(result))
    print(f"{len(result['tests'])} tests; their output and the raw files: {work}")


def gather(work: Path) -> dict:
    """Return the tests by number, and of each mutant the numbers of tests that get to it."""
    tests = [json.loads(line) for line in (work / "tests.jsonl").read_text().splitlines()]
    reached: dict[int, set[int]] = defaultdict(set)
    for file in (work / "reached").iterdir():
        for line in file.read_text().splitlines():
            test, site = map(int, line.split())
            reached[site].add(test)
    return {
        "cpu": round(sum(test["cpu"] for test in tests), 1),
        "wall": round(sum(test["wall"] for test in tests), 1),
        "outcomes": Counter(test["outcome"] for test in tests),
        "reached": {str(site): sorted(reached[site] - {0}) for site in sorted(reached)},
        "tests": [[t["n"], t["test"], t["outcome"], t["cpu"], t["wall"]] for t in tests],
    }


def coverage_of(root: Path, work: Path) -> dict[str, float]:
    """Combine what all processes recorded; files that none loaded count as well."""
    import coverage

    every = sorted(str(path) for path in (root / "bagent").rglob("*.py"))
    measured = coverage.Coverage(config_file=str(work / "coverage.ini"))
    measured.combine([str(work / "coverage")], keep=True)
    measured.save()
    with suppress(coverage.CoverageException):
        measured.get_data().touch_files(every)
    measured.json_report(morfs=every, outfile=str(work / "coverage.json"), ignore_errors=True)
    totals = json.loads((work / "coverage.json").read_text())["totals"]
    lines, branches = totals["covered_lines"], totals["covered_branches"]
    percent = {
        "lines": 100 * lines / totals["num_statements"],
        "branches": 100 * branches / totals["num_branches"],
        "both": 100 * (lines + branches) / (totals["num_statements"] + totals["num_branches"]),
    }
    totals = {name: totals[name] for name in totals if name.startswith(("num_", "covered_"))}
    return {name: round(value, 2) for name, value in percent.items()} | totals


# --- what the mutants do to the tests --------------------------------------------------------


class Reach:
    """The answers of :func:`reach`: which tests to run for a mutant."""

    def __init__(self, path: Path) -> None:
        self.data = json.loads(path.read_text())
        self.tests = {test[0]: test for test in self.data["tests"]}
        self.breadth = Counter(n for tests in self.data["reached"].values() for n in tests)

    def select(self, mutant: sites.Mutant, cap: float, but: set[str]) -> list[list]:
        """Return the tests to run, cheap and specific ones first, ``cap`` CPU seconds of them."""
        package = mutant.file.split("/")[1]

        def score(test: list) -> float:
            near = f"/{package}/" in test[1].partition("::")[0]
            return (test[3] + 0.02) * self.breadth[test[0]] * (1.0 if near else ELSEWHERE)

        numbers = self.data["reached"].get(str(mutant.number), [])
        tests = [self.tests[n] for n in numbers if n in self.tests]
        selected, spent = [], 0.0
        for test in sorted(tests, key=score):
            if test[2] == "passed" and test[1] not in but and spent + test[3] <= cap:
                spent += test[3]
                selected.append(test)
        return selected


def run(args: argparse.Namespace) -> None:
    """Apply the mutants one after the other and note which tests fail."""
    # Processes that a hanging test left become children of this one, which ends them.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    out = Path(args.out)
    reach_file = Path(args.reach or out.with_name(f"{out.stem}-reach.json"))
    if not args.reach and not reach_file.exists():
        reach(args, reach_file)
    plan, began = Reach(reach_file), time.monotonic()
    state = json.loads(out.read_text()) if out.exists() else {"mutants": {}}
    state |= {"commit": commit(), "cap": args.cap, "coverage": plan.data.get("coverage")}
    for mutant in load_mutants():
        if args.only and mutant.number not in args.only:
            continue
        earlier = state["mutants"].get(str(mutant.number), {"verdict": "new"})["verdict"]
        if earlier not in ("new", *args.again) or time.monotonic() - began > args.budget:
            continue
        report(state, mutant, judge(mutant, plan, args, set()), out)
    doubtful = check_killers(state, plan, args)
    for mutant in load_mutants():
        verdict = state["mutants"].get(str(mutant.number), {})
        if verdict.get("by") in doubtful:
            report(state, mutant, judge(mutant, plan, args, doubtful), out)
    print(json.dumps(state["counts"]))


def report(state: dict, mutant: sites.Mutant, verdict: dict, out: Path) -> None:
    """Keep one mutant's verdict in the file, and print it."""
    state["mutants"][str(mutant.number)] = verdict
    state["counts"] = Counter(one["verdict"] for one in state["mutants"].values())
    out.write_text(dump(state))
    more = f"{verdict['seconds']} s, {verdict['tests']} of {verdict['reach']} tests"
    print(
        f"{mutant.number:3} {verdict['verdict']:10} {mutant.file} {mutant.function}: {more}",
        f"by {verdict['by']}" if verdict["by"] else "",
        flush=True,
    )


def judge(mutant: sites.Mutant, plan: Reach, args: argparse.Namespace, but: set[str]) -> dict:
    """Return what became of one mutant.

    The verdicts: ``killed`` (a test failed), ``hung`` (a test took too long; counts as killed),
    ``survived``, ``unreached`` (no test gets to it) and ``unplaced`` (its text is gone).
    """
    tests = plan.select(mutant, args.cap, but)
    of = len(plan.data["reached"].get(str(mutant.number), []))
    verdict = {"verdict": "unreached", "by": "", "seconds": 0.0, "tests": len(tests), "reach": of}
    placed = sites.locate(Path.cwd(), mutant)
    if placed is None:
        return verdict | {"verdict": "unplaced"}
    if not tests:
        return verdict
    began, cpu = time.monotonic(), _cpu()
    if placed.mutant != mutant:
        verdict["changed"] = [placed.mutant.before, placed.mutant.after]
    times = placed.path.stat()
    result = {"failed": [], "code": 0}
    try:
        placed.path.write_bytes(placed.mutated)
        for some in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
            if some and not result["failed"] and result["code"] == 0:
                result = run_tests(some, ["-x"], mutant.number)
    finally:
        placed.path.write_bytes(placed.original)
        os.utime(placed.path, ns=(times.st_atime_ns, times.st_mtime_ns))
        end_children()
    verdict["seconds"] = round(time.monotonic() - began, 1)
    verdict["cpu"] = round(_cpu() - cpu, 1)
    if result["failed"]:
        hung = "Timeout (>" in result["why"]
        return verdict | {"verdict": "hung" if hung else "killed", "by": result["failed"][0]}
    if result["code"] is None:
        return verdict | {"verdict": "hung", "by": "(all of them together)"}
    if result["code"] != 0:
        return verdict | {"verdict": "killed", "by": f"(pytest ended with {result['code']})"}
    return verdict | {"verdict": "survived"}


def run_tests(tests: list[list], args: list[str], number: int | str) -> dict:
    """Run the tests in one process; ``code`` is None where they took too long all together."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        selection = Path(name) / "tests.json"
        timeouts = {test[1]: max(LEAST_TIMEOUT, TIMES_AS_LONG * test[4]) for test in tests}
        selection.write_text(json.dumps(timeouts))
        files = sorted({test.partition("::")[0] for test in timeouts})
        command = pytest_command("select", selection, [*files, *args])
        longest = 120 + TIMES_AS_LONG * sum(test[4] for test in tests)
        file = selection.with_suffix(".result")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            output = _output(process, file, time.monotonic() + longest)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        code = None if output is None else process.returncode
        result = json.loads(file.read_text()) if file.exists() else {"ran": 0, "failed": []}
        if output is not None and code not in (0, 1):
            print(f"pytest of {number} ended with {code}:", output.decode()[-600:])
        return result | {"code": code}


def _output(process: subprocess.Popen, file: Path, until: float) -> bytes | None:
    """Wait for pytest's end; None where it takes too long, or does not end after a failure."""
    ending = False
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=2)[0]
        with suppress(OSError, ValueError):  # not there yet, or half written
            if not ending and json.loads(file.read_text())["failed"]:
                ending, until = True, time.monotonic() + LEAST_TIMEOUT
    return None


def end_children() -> None:
    """End the processes that tests left."""
    for _ in range(100):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        if not children:
            return
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(int(child), 0)


def check_killers(state: dict, plan: Reach, args: argparse.Namespace) -> set[str]:
    """Run the tests that noticed a mutant without one; return those that fail all the same."""
    killers = {one["by"] for one in state["mutants"].values()} - {""}
    checked = set(state.get("killers_passed", []))
    tests = [test for test in plan.tests.values() if test[1] in killers - checked]
    failed = set(run_tests(tests, [], "no mutant")["failed"]) if tests else set()
    state["killers_passed"] = sorted(checked | {test[1] for test in tests} - failed)
    state["killers_failed"] = sorted(failed)
    Path(args.out).write_text(dump(state))
    end_children()
    return failed


def commit() -> str:
    """Return the checkout's commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def dump(value: dict) -> str:
    """Return JSON with a line for each entry of the inner objects and arrays."""
    return "{" + ",\n".join(f"{json.dumps(name)}: {_inner(value[name])}" for name in value) + "}\n"


def _inner(value: object) -> str:
    if isinstance(value, dict):
        entries = ",\n".join(f"{json.dumps(str(n))}: {json.dumps(v)}" for n, v in value.items())
        return "{" + entries + "}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[" + ",\n".join(json.dumps(entry) for entry in value) + "]"
    return json.dumps(value)


def main() -> None:
    """Read the command line."""
    if sys.argv[1:2] == ["_pytest"]:
        sys.exit(run_pytest(sys.argv[2], sys.argv[3], sys.argv[4:]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["make", "reach", "run", "list"])
    parser.add_argument("--tests-dir", nargs="+", default=["tests"], help="folders of the suite")
    parser.add_argument("--out", help="file for the result")
    parser.add_argument("--reach", help="run: what `reach` wrote (default: made first)")
    parser.add_argument("--coverage", action="store_true", help="also record lines and branches")
    parser.add_argument("--timeout", type=float, default=300, help="reach: seconds for a test")
    parser.add_argument("--cap", type=float, default=30, help="CPU seconds of tests for a mutant")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for all mutants")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    parser.add_argument("--again", nargs="*", default=[], help="verdicts that are judged again")
    parser.add_argument("--seed", type=int, default=SEED, help="make: another choice")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if args.command == "make":
        made = [vars(mutant) for mutant in sites.make(Path.cwd(), args.seed)]
        MUTANTS.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    elif args.command == "list":
        for mutant in load_mutants():
            placed = sites.locate(Path.cwd(), mutant)
            versions = [mutant]
            if placed is not None and placed.mutant != mutant:
                versions.append(placed.mutant)
            for version in versions:
                title = (
                    "LINES CHANGED, NOW:"
                    if version is not mutant
                    else f"{mutant.number} {mutant.area}:"
                )
                print(title, version.file, version.function, "NOT PLACED" * (placed is None))
                print("  - " + version.before.replace("\n", "\n    "))
                print("  + " + version.after.replace("\n", "\n    "))
    elif args.command == "reach":
        reach(args, Path(args.out))
    else:
        run(args)


if __name__ == "__main__":
    main()
