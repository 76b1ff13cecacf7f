"""The simulated tokenizer and chat template.

A token is up to four bytes of UTF-8: the text is cut every four bytes, so English has four
characters per token, and texts with equal beginnings have token ids with equal beginnings.
``<|im_start|>``, ``<|im_end|>``, ``<|endoftext|>`` and the NUL character are one token each, and
cutting restarts after them. A token's id is its four bytes (padded with zeros) as a little-endian
32-bit number; the special tokens have ids from 0xFF000000, which no UTF-8 text can have. So
nothing is stored, and :func:`text_of` returns exactly the text that :func:`pack` took.

Token sequences are *packed*: ``bytes`` with four bytes per token.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import Any

import msgspec

from bagent.types import Json, Message

_SPECIAL_TEXTS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "\0")
_CODES = {text: struct.pack("<I", 0xFF000000 + i) for i, text in enumerate(_SPECIAL_TEXTS)}
_SPECIAL_BYTES = {code: text.encode() for text, code in _CODES.items()}
_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in _SPECIAL_TEXTS) + ")")


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def pack(text: str) -> bytes:
    """Tokenize a text to four bytes per token; lone surrogates become ``?``."""
    if "<|" not in text and "\0" not in text:
        return _padded(text.encode("utf-8", "replace"))
    parts: list[bytes] = []
    for piece in _SPLIT.split(text):
        code = _CODES.get(piece)
        parts.append(code or _padded(piece.encode("utf-8", "replace")))
    return b"".join(parts)


def count(packed: bytes) -> int:
    """Return the number of tokens."""
    return len(packed) // 4


def ids_of(packed: bytes) -> list[int]:
    """Return the token ids, each from 0 to 2**32 - 1."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def pack_ids(ids: list[int]) -> bytes:
    """Return the packed form of token ids.

    Raises:
        ValueError: an id is no number from 0 to 2**32 - 1.
    """
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        raise ValueError("a token id is out of vocabulary") from None


def bytes_of(packed: bytes) -> bytes:
    """Return the UTF-8 bytes of tokens; they may begin or end inside a character."""
    if b"\xff" not in packed:
        return packed.replace(b"\0", b"")
    cut = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return b"".join(_SPECIAL_BYTES.get(code) or code.replace(b"\0", b"") for code in cut)


def text_of(packed: bytes) -> str:
    """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
    return bytes_of(packed).decode("utf-8", "replace")


def token_texts(packed: bytes) -> list[str]:
    """Return each token's own text."""
    return [text_of(packed[i : i + 4]) for i in range(0, len(packed), 4)]


def block_hashes(packed: bytes, block: int, salt: str | None) -> list[int]:
    """Return one number per full block of ``block`` tokens, which stands for all tokens up to its
    end.

    Equal numbers mean equal beginnings under the same ``salt``, within one process.
    """
    size = 4 * block
    last = hash(salt)
    hashes: list[int] = []
    for end in range(size, len(packed) + 1, size):
        last = hash((last, packed[end - size : end]))
        hashes.append(last)
    return hashes


def content_text(content: Json) -> str:
    """Return the text of a message's content: parts are joined by line ends, an image leaves a
    mark."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("content must be a text or a list of parts")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, dict):
            raise ValueError("a content part must be an object")
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            data = msgspec.json.encode(part, order="deterministic")
            texts.append(f"<image {len(data)}-{zlib.crc32(data):08x}>")
    return "\n".join(texts)


def render(
    messages: list[Message],
    tools: Json = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the conversation in ChatML, with tools as a system message.

    Raises:
        ValueError: a message has no role or invalid content.
    """
    parts: list[str] = []
    if tools:
        listed = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
        parts.append(f"<|im_start|>system\n# Tools\n{listed}<|im_end|>\n")
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str):
            raise ValueError("a message needs a role")
        text = content_text(message.get("content"))
        for call in message.get("tool_calls") or ():
            text += f"\n<tool_call>\n{_call_text(call)}\n</tool_call>"
        parts.append(f"<|im_start|>{role}\n{text}<|im_end|>\n")
    if continue_final_message and messages:
        parts[-1] = parts[-1].removesuffix("<|im_end|>\n")
    elif add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError("a tool call needs a function")
    fields = {"name": function.get("name"), "arguments": function.get("arguments")}
    return msgspec.json.encode(fields).decode()
