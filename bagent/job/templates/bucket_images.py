"""Images in buckets: the folders that a job lets its rows name, and the content of images."""

from __future__ import annotations

from collections.abc import Iterable

from bagent.errors import MissingPackage
from bagent.remote import RemoteError, open_remote
from bagent.remote.urls import with_lower_scheme

MAX_BYTES = 64 * 1024 * 1024
"""Largest image, before encoding."""


class ImageError(Exception):
    """An image cannot be used.

    Args:
        message: why, one line.
        passing: whether the same request may succeed later.
    """

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


class BucketImages:
    """Reads images of rows from the folders of buckets that the job names, and from no others.

    Args:
        folders: how URLs may begin: folders, each with a slash at its end, or one image.
    """

    def __init__(self, folders: Iterable[str] = ()) -> None:
        self.folders = tuple(folders)
        self._loaded: dict[str, bytes | ImageError] = {}
        self._last: tuple[str, bytes] = ("", b"")

    def allow(self, beginning: str) -> None:
        """Let rows name also the images whose URLs begin so."""
        self.folders += (beginning,)

    def check(self, source: str) -> str:
        """Return the URL of an image with its scheme in lower case.

        Raises:
            ImageError: it is in none of the folders.
        """
        url = with_lower_scheme(source)
        segments = url.split("/")
        if ".." in segments or "." in segments:
            raise ImageError(f"{cut(source)} has . or .. in its path")
        if not url.startswith(self.folders):
            folder = url.rpartition("/")[0]
            raise ImageError(
                f"{cut(source)} is in no folder of a bucket that the job names"
                f" (image_folders: [{cut(folder)}/] lets rows name images there)"
            )
        return url

    def read(self, source: str) -> bytes:
        """Return the content of an image: at once where :meth:`load` has read it.

        Raises:
            ImageError: it may not be read, is not there, is too large, or the bucket refuses it.
        """
        url = self.check(source)
        content = self._loaded.get(url)
        if isinstance(content, ImageError):
            raise content
        if content is None and self._last[0] == url:
            content = self._last[1]
        if content is None:
            content = _read(url)
            self._last = url, content
        return content

    def load(self, sources: Iterable[str]) -> list[str]:
        """Read images and hold them; return their URLs for :meth:`release`. For any thread.

        What is no image in one of the folders is left to :meth:`read`, which says so.
        """
        urls = []
        for source in sources:
            try:
                url = self.check(source)
            except ImageError:
                continue
            urls.append(url)
            try:
                self._loaded[url] = _read(url)
            except ImageError as error:
                self._loaded[url] = error
        return urls

    def release(self, urls: Iterable[str]) -> None:
        """Drop images that :meth:`load` has read."""
        for url in urls:
            self._loaded.pop(url, None)


def _read(url: str) -> bytes:
    try:
        file = open_remote(url)
        if file.stat.size > MAX_BYTES:
            raise ImageError(f"{cut(url)} is larger than 64 MB")
        with file.open() as opened:
            return opened.read()
    except MissingPackage as error:
        raise ImageError(str(error)) from None
    except RemoteError as error:
        message = f"cannot read {cut(url)}: {error.strerror}"
        raise ImageError(message, passing=error.passing) from None
    except ImageError:
        raise
    except Exception as error:  # noqa: BLE001 - URLs of rows reach drivers, which raise anything
        raise ImageError(f"cannot read {cut(url)}: {error}") from None


def cut(text: str) -> str:
    """Return a source for messages: at most 200 characters."""
    return text if len(text) <= 200 else text[:197] + "..."
