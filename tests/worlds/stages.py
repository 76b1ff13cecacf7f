"""Jobs of several stages: their keys, and answers that say what they were made of."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

Json = Any

MARK = "<<{{ n }}v{{ v }}>>"

LEAF = re.compile(r"<<(\d+)v(\d+)>>(?:/(\d+))?")
"""A row in a prompt or an answer, or one of its parts."""

DIGEST = re.compile(r"#([0-9a-f]{12})")
"""What an answer says of the request that it answers."""

ROUNDS = 2
FANIN = 3
PIECE_TOKENS = 30

_REDUCE = {"prompt": "[reduce] {{ n }}\n{{ responses }}"}
_LABEL = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "key": {"type": "string"}},
    "required": ["label", "key"],
}

TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "pipeline": ("step1", "step2", "step3"),
    "judge": ("answer", "judge"),
    "vote": ("sample",),
    "map_reduce": ("map", "reduce"),
    "tree_reduce": ("map", "reduce"),
    "grouped": ("map", "reduce"),
    "plan": ("plan", "work", "reduce"),
    "blackboard": ("alpha", "beta"),
    "broadcast": ("broadcast", "reduce"),
    "split": ("read", "reduce"),
    "embed": ("note", "vector"),
}
"""The prompts of each topology, by name."""

ANSWERS = {"judge": 2, "vote": 3}
"""Answers of each row, where it has several."""

LAST = {
    "pipeline": "step3", "judge": "judge", "vote": "vote", "blackboard": "blackboard",
    "embed": "vector",
}  # fmt: skip
"""The last stage of each topology; else it is the reduction."""


def job_keys(topology: str, on_failure: str = "") -> dict[str, Json]:
    """Return the keys of a job with a topology."""
    first = f"[{TOPOLOGIES[topology][0]}] {MARK} {{{{ text }}}}"
    names = {"vote": "self_consistency", "plan": "plan_map_reduce", "grouped": "tree_reduce"}
    name = names.get(topology, topology)
    keys: dict[str, Json] = {"prompt": {"user": first}, "topology": {"name": name}}
    parts = keys["topology"]
    match topology:
        case "split" | "embed":
            return {"prompt": None, "stages": _own_stages(topology, first)}
        case "pipeline":
            keys["prompt"] = None
            parts["steps"] = [
                {"prompt": first},
                {"prompt": f"[step2] {MARK} {{{{ step1 }}}}"},
                {"prompt": f"[step3] {MARK} {{{{ step1 }}}} and {{{{ step2 }}}}"},
            ]
        case "judge":
            parts["judge"] = {"prompt": f"[judge] {MARK} {{{{ answer }}}}"}
        case "vote":
            keys["output"] = {"schema": _LABEL}
            parts["vote"] = "label"
        case "plan":
            keys["prompt"] = {"user": "[work] {{ item }}"}
            parts |= {"plan": {"prompt": first}, "reduce": _REDUCE}
        case "blackboard":
            keys["prompt"] = None
            parts["max_rounds"] = ROUNDS
            parts["sections"] = [
                {"name": section, "prompt": f"[{section}] {MARK} {{{{ round }}}} {{{{ board }}}}"}
                for section in TOPOLOGIES[topology]
            ]
        case _:
            parts["reduce"] = _REDUCE
    if on_failure:
        parts["on_failure"] = on_failure
    if topology in ("tree_reduce", "grouped"):
        parts["fanin"] = FANIN
    if topology == "grouped":
        parts["by"] = ["text"]
    if topology in ANSWERS:
        keys["answers"] = ANSWERS[topology]
        keys["sampling"] = {"temperature": 0.7, "max_tokens": 64, "seed": 1}
    return keys


def _own_stages(topology: str, first: str) -> list[dict[str, Json]]:
    """Return the stages of a job that writes them out."""
    if topology == "embed":
        return [
            {"kind": "map", "name": "note", "prompt": first},
            {"kind": "embed", "name": "vector"},
        ]
    split = {"field": "text", "tokens": PIECE_TOKENS, "overlap": 6}
    return [
        {"kind": "expand", "name": "piece", "split": split},
        {"kind": "map", "name": "read", "prompt": first},
        {"kind": "reduce", "name": "reduce", **_REDUCE},
    ]


def long_text(row: int, words: int) -> str:
    """Return a text whose words say where they stand, to be split."""
    return " ".join(f"<<{row}v0>>/{word}" for word in range(words))


def vector_of(text: str) -> list[float]:
    """Return the vector of a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return [int(digest[:4], 16) / 1000, int(digest[4:], 16) / 1000, 0.5]


def vectors_body(kind: str, texts: list[str]) -> Json:
    """Return the answer to a request for vectors; some servers send none, or too few."""
    vectors = [{"index": n, "embedding": vector_of(text)} for n, text in enumerate(texts)]
    if kind in ("blank", "nochoice"):
        vectors = vectors[1:]
    usage = {"prompt_tokens": 10 * len(texts), "total_tokens": 10 * len(texts)}
    return {"object": "list", "model": "world-model", "data": vectors, "usage": usage}


def read_prompt(request: dict[str, Json], endpoint: int) -> tuple[str, str, str]:
    """Return the stage of a request, its prompt, and a digest that no other request has."""
    texts = (message["content"] for message in request["messages"])
    prompt = next(text for text in texts if text.startswith("["))  # the schema may come before it
    stage = prompt[1 : prompt.index("]")]
    parts = [msgspec.json.encode(request["messages"]).decode(), str(request.get("seed"))]
    if stage == "broadcast":
        parts.append(str(endpoint))
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()
    return stage, prompt, digest


def leaves(text: str) -> tuple[str, ...]:
    """Return the rows, and parts of rows, that a text names, each once."""
    return tuple(sorted({match[0] for match in LEAF.finditer(text)}))


def answer_text(stage: str, prompt: str, digest: str) -> str:
    """Return the one right answer to a prompt: its digest, and the rows that it is made of."""
    marks = leaves(prompt)
    if stage == "plan":
        items = [f"{marks[0]}/{part} #{digest}" for part in range(items_of(marks[0]))]
        return msgspec.json.encode({"items": items}).decode()
    if stage == "sample":
        return msgspec.json.encode({"label": label_of(digest), "key": f"#{digest}"}).decode()
    return f"#{digest} {stage} {' '.join(marks)}"


def items_of(mark: str) -> int:
    """Return the number of parts that the plan for a row has."""
    return int(LEAF.fullmatch(mark)[1]) % 3 + 1  # type: ignore[index]


def label_of(digest: str) -> str:
    """Return the label that a request for a vote is answered with."""
    return "ab"[int(digest, 16) % 2]


def digest_of(result: dict[str, Json]) -> str | None:
    """Return the digest of the request that a result answers; None: it was not requested."""
    text = result["text"]
    match = DIGEST.search(text) if isinstance(text, str) else None
    return None if match is None else match[1]
