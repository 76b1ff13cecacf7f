"""The simulated tokenizer and chat template.

A token is up to four bytes of UTF-8: the text is cut every four bytes, so English has four
characters a token, and texts that begin alike have token ids that begin alike. ``<|im_start|>``,
``<|im_end|>``, ``<|endoftext|>`` and the NUL character are one token each, and cutting starts anew
after them. A token's id is its four bytes (padded with zeros) read as a little-endian 32-bit
number; the four special tokens have ids from 0xFF000000, which no UTF-8 text can have. So nothing
is stored, and :func:`text_of` gives back exactly the text that :func:`pack` took.

Token sequences are kept *packed*: ``bytes`` with four bytes a token.
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
    """Tokenize: four bytes a token. Lone surrogates become ``?``, as UTF-8 cannot hold them."""
    if "<|" not in text and "\0" not in text:
        return _padded(text.encode("utf-8", "replace"))
    parts: list[bytes] = []
    for piece in _SPLIT.split(text):
        code = _CODES.get(piece)
        parts.append(code or _padded(piece.encode("utf-8", "replace")))
    return b"".join(parts)


def count(packed: bytes) -> int:
    """Number of tokens."""
    return len(packed) // 4


def ids_of(packed: bytes) -> list[int]:
    """The token ids, each from 0 to 2**32 - 1."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def pack_ids(ids: list[int]) -> bytes:
    """The packed form of token ids.

    Raises:
        ValueError: an id is no number from 0 to 2**32 - 1.
    """
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        raise ValueError("a token id is out of vocabulary") from None


def bytes_of(packed: bytes) -> bytes:
    """The UTF-8 bytes of tokens; may begin or end inside a character."""
    if b"\xff" not in packed:
        return packed.replace(b"\0", b"")
    cut = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return b"".join(_SPECIAL_BYTES.get(code) or code.replace(b"\0", b"") for code in cut)


def text_of(packed: bytes) -> str:
    """Detokenize; bytes that are no UTF-8 become U+FFFD."""
    return bytes_of(packed).decode("utf-8", "replace")


def token_texts(packed: bytes) -> list[str]:
    """Each token's own text."""
    return [text_of(packed[i : i + 4]) for i in range(0, len(packed), 4)]


def block_hashes(packed: bytes, block: int, salt: str | None) -> list[int]:
    """One number for each full block of ``block`` tokens: it stands for all tokens up to its end.

    Equal numbers mean equal beginnings under the same ``salt`` (within one process).
    """
    size = 4 * block
    last = hash(salt)
    hashes: list[int] = []
    for end in range(size, len(packed) + 1, size):
        last = hash((last, packed[end - size : end]))
        hashes.append(last)
    return hashes


def content_text(content: Json) -> str:
    """The text of a message's content: parts are joined by line ends, an image leaves a mark."""
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
    """The conversation in ChatML, tools as a system message of their own.

    Raises:
        ValueError: a message has no role or a content of the wrong kind.
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
    known = {"name": function.get("name"), "arguments": function.get("arguments")}
    return msgspec.json.encode(known).decode()
