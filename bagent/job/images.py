"""Images in prompts: files under the job's folder as ``data:`` URLs, web addresses as they are."""

from __future__ import annotations

import base64
import os
from pathlib import Path

MAX_BYTES = 64 * 1024 * 1024
"""Largest image file, before encoding."""

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)


class ImageError(Exception):
    """An image cannot be used; the text says why."""


def image_url(source: str, folder: Path) -> str:
    """The URL to send for ``source``.

    ``http:``, ``https:`` and ``data:`` URLs are passed on; anything else is the path of a file
    in ``folder`` or below it, also after links are followed.

    Raises:
        ImageError: no such file, a file outside the folder, no known image type, too large.
    """
    text = source.strip()
    if text.lower().startswith(("http://", "https://", "data:image/")):
        return text
    if not text:
        raise ImageError("the image's path is empty")
    if "://" in text:
        raise ImageError(f"{_cut(text)} is neither a path nor an http(s) URL")
    content = _read(text, folder)
    mime = _mime(content)
    if mime is None:
        raise ImageError(f"{_cut(text)} is no PNG, JPEG, GIF, WebP, BMP, TIFF or AVIF image")
    return f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"


def _read(text: str, folder: Path) -> bytes:
    try:
        base = folder.resolve()
        path = (base / text).resolve()
        if not path.is_relative_to(base):
            raise ImageError(f"{_cut(text)} is outside the job's folder")
        if not path.is_file():
            raise ImageError(f"no such image: {_cut(text)}")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ImageError(f"cannot read {_cut(text)}: {reason}") from None
    except (ValueError, RuntimeError) as error:
        raise ImageError(f"{_cut(text)} is no path: {error}") from None
    if len(content) > MAX_BYTES:
        raise ImageError(f"{_cut(text)} is larger than 64 MB")
    return content


def _mime(content: bytes) -> str | None:
    """The type by the first bytes, as browsers tell it: names may lie.

    Source: https://mimesniff.spec.whatwg.org/#matching-an-image-type-pattern
    """
    for signature, mime in _SIGNATURES:
        if content.startswith(signature):
            return mime
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    if content[4:12] in (b"ftypavif", b"ftypavis"):
        return "image/avif"
    return None


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."
