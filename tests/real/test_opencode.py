"""OpenCode and Claude Code, as they come from npm, answer rows through the run's own proxy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real.parts import CACHE
from real.serve_vllm import VllmServer
from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import parquet, results, write_job
from support.provider_protocols import AnthropicWire, Json, ModelAnswer
from support.provider_server import serve_in_thread
from support.replies import ok, ok_tools, tool_call

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]


def program(name: str, folder: str) -> Path:
    """The installed program; the test is skipped where npm could not install it."""
    path = CACHE / folder / "node_modules/.bin" / name
    if not (CACHE / folder / ".installed").exists():
        pytest.skip(f"no {name} here: tests/real/install_{folder}.sh installs it, with npm")
    return path


def proxied(run: Path) -> list[dict[str, Json]]:
    """What the run's proxy metered, one row a request."""
    (folder,) = (run / "proxy").iterdir()
    return results(folder, str(folder))


HEAT = [
    ok_tools(tool_call("read", '{"filePath":"heat.py"}')),
    ok_tools(
        tool_call(
            "bash",
            '{"command":"sed -i \'s/return.*/return (fahrenheit - 32) * 5 \\\\/ 9/\' heat.py",'
            '"description":"mend"}',
        )
    ),
    ok('{"file": "heat.py", "cause": "the parentheses are missing"}'),
]


def test_opencode_mends_a_file_in_a_folder_of_the_row_s_own(job_dir: Path) -> None:
    path = f"{program('opencode', 'opencode').parent}:/usr/bin:/bin"
    with FakeServer({"*": HEAT}, model="coder", flavour="vllm", row_pattern="(heat)") as fs:
        job = ROOT / "jobs/mend/job.yaml"
        lines = (job.parent / "bugs.jsonl").read_text().splitlines()
        (job_dir / "one.jsonl").write_text(next(line for line in lines if "heat.py" in line))
        args = ["run", job, "--backend", f"vllm://{fs.address}", "-i", "one.jsonl"]
        done = run_bagent(args, job_dir, env={"PATH": path}, timeout=300)
        assert done.code == 0, done.err
        bodies = [seen.body for seen in fs.requests]
    run = job_dir / "runs/mend"
    (row,) = parquet(run)
    assert (row["status"], row["id"], row["model"]) == ("ok", "heat", "coder")
    (answer,) = parquet(run, "answers")
    assert answer["file"] == "heat.py"
    assert len(bodies) == 3 and all(body["stream"] and body["tools"] for body in bodies)
    assert [body["messages"][-1]["role"] for body in bodies] == ["user", "tool", "tool"]
    (folder,) = (run / "work").iterdir()
    assert "(fahrenheit - 32) * 5 / 9" in (folder / "heat.py").read_text()
    assert "- 32 * 5" in (job.parent / "project/heat.py").read_text()
    assert list((run / "home").iterdir()) == []
    requests = proxied(run)
    assert {one["id"] for one in requests} == {folder.name}
    for name in ("prompt_tokens", "completion_tokens"):
        assert row[name] == sum(one[name] for one in requests) > 0


def inside(folder: Path) -> list[str]:
    """The processes that run in a folder or below it, by their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve().is_relative_to(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile, or is a zombie
    return found


def test_opencode_and_the_shell_it_started_are_killed_at_the_row_s_limit(job_dir: Path) -> None:
    command = [str(program("opencode", "opencode")), "run", "--title", "{id}"]
    shell = {"command": "echo $$ > shell.txt; sleep 300", "description": "wait"}
    script = [ok_tools(tool_call("bash", json.dumps(shell)))]
    with FakeServer({"*": script}, model="coder", flavour="vllm", row_pattern="(text)") as fs:
        limits = {"row": "20s"}
        rows = [{"id": "r1", "text": "text"}]
        write_job(job_dir, fs.url, rows, model="coder", agent={"command": command}, limits=limits)
        done = run_bagent(["run", "job.yaml"], job_dir, timeout=120)
        assert done.code == 1, done.err
    run = job_dir / "runs/job"
    (row,) = parquet(run)
    assert (row["status"], row["error_kind"]) == ("failed", "timeout")
    assert row["prompt_tokens"] == sum(one["prompt_tokens"] for one in proxied(run)) > 0
    (folder,) = (run / "work").iterdir()
    assert (folder / "shell.txt").exists()
    assert inside(folder) == []


def test_opencode_asks_a_real_vllm_and_is_metered(vllm_tiny: VllmServer, job_dir: Path) -> None:
    command = [str(program("opencode", "opencode")), "run", "--title", "{id}"]
    small = {"agent": {"build": {"prompt": "Be brief.", "tools": {"*": False, "write": True}}}}
    (job_dir / "small.json").write_text(json.dumps(small))
    write_job(
        job_dir,
        vllm_tiny.backend,
        1,
        model="auto",
        agent={"command": command, "env": {"OPENCODE_CONFIG": "{job_folder}/small.json"}},
        sampling={"max_tokens": 32},
    )
    done = run_bagent(["run", "job.yaml"], job_dir, timeout=300)
    (row,) = parquet(job_dir / "runs/job")
    assert row["prompt_tokens"] > 1000 and 0 < row["completion_tokens"] <= 32, done.err
    (request,) = proxied(job_dir / "runs/job")
    assert (request["status"], request["model"]) == ("ok", "tiny")
    assert row["text"] and (done.code, row["status"]) == (0, "ok"), done.err


class LooseWire(AnthropicWire):
    """The Messages API as servers of open models take it, without the provider's strict rules."""

    def complaint(self, body: Json) -> str | None:
        """Nothing is wrong but a missing limit."""
        return None if isinstance(body.get("max_tokens"), int) else "max_tokens: Field required"


def test_claude_code_calls_a_tool_and_its_last_words_are_the_answer(job_dir: Path) -> None:
    claude = program("claude", "claude_code")
    asked = ModelAnswer(
        text=None,
        stop="tool_use",
        calls=(("toolu_1", "Bash", {"command": "echo 42 > out.txt", "description": "write"}),),
    )
    with serve_in_thread(LooseWire(), asked, ModelAnswer(text="It says 42.")) as server:
        command = [str(claude), "--print", "--allowedTools", "Bash"]
        backend = {"url": f"anthropic+{server.url}/v1", "api_key_env": "MY_KEY"}
        write_job(
            job_dir,
            "",
            [{"id": "a", "text": "Write 42 into out.txt."}],
            backend=backend,
            model="m-1",
            agent={"command": command},
            sampling={"max_tokens": 500},
        )
        done = run_bagent(["run", "job.yaml"], job_dir, env={"MY_KEY": "sk-own"}, timeout=200)
        assert done.code == 0, done.err
        messages = [
            (body, headers)
            for body, headers, path in zip(server.bodies, server.headers, server.paths, strict=True)
            if path == "/v1/messages"
        ]
    run = job_dir / "runs/job"
    (row,) = parquet(run)
    assert (row["status"], row["text"]) == ("ok", "It says 42.")
    assert len(messages) == 2
    assert all(headers["x-api-key"] == "sk-own" for _, headers in messages)
    assert all("claude-code" in headers["anthropic-beta"] for _, headers in messages)
    assert all((body["model"], body["max_tokens"]) == ("m-1", 500) for body, _ in messages)
    (folder,) = (run / "work").iterdir()
    assert (folder / "out.txt").read_text() == "42\n"
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (60, 40, 14)
