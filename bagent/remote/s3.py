"""S3 through boto3, which bagent needs anyway: s3fs pins an older botocore beside it.

boto3 finds keys, region and address itself: in variables, profiles and roles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bagent.errors import MissingPackage
from bagent.remote.storage import CHANGED, RemoteError, RemoteStat

T = TypeVar("T")

_PASSING = {408, 409, 429, 500, 502, 503, 504}
_ADDRESSES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class S3Storage:
    """Objects in buckets of S3 and of servers that speak its protocol.

    Raises:
        MissingPackage: boto3 is not installed.
    """

    def __init__(self) -> None:
        try:
            import boto3
            from botocore import UNSIGNED
            from botocore.config import Config
        except ImportError as error:
            raise MissingPackage("s3:// needs boto3", hint="pip install boto3") from error
        session = boto3.session.Session()
        self._signed = session.get_credentials() is not None
        settings: dict[str, Any] = {
            "connect_timeout": 10,
            "read_timeout": 60,
            "max_pool_connections": 32,
            "retries": {"mode": "standard", "total_max_attempts": 1},
        }
        if not self._signed:
            settings["signature_version"] = UNSIGNED  # public data sets need no key
        if any(map(os.environ.get, _ADDRESSES)):
            settings["s3"] = {"addressing_style": "path"}
        self._client: Any = session.client("s3", config=Config(**settings))

    def stat(self, url: str) -> RemoteStat:
        """Return the size and the ETag."""
        head = self._call(lambda: self._client.head_object(**_object(url)))
        return RemoteStat(url, head["ContentLength"], head.get("ETag", ""))

    def find(self, prefix: str) -> Iterator[RemoteStat]:
        """Yield the objects below a prefix."""
        bucket, key = _split(prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
        for page in self._call(lambda: list(pages)):
            for item in page.get("Contents", ()):
                yield RemoteStat(f"s3://{bucket}/{item['Key']}", item["Size"], item["ETag"])

    def read(self, file: RemoteStat, start: int, end: int) -> bytes:
        """Return a range of the object, while its ETag is the same."""
        condition = {"IfMatch": file.version} if file.version else {}
        byte_range = f"bytes={start}-{end - 1}"

        def fetch() -> bytes:
            reply = self._client.get_object(**_object(file.url), Range=byte_range, **condition)
            content: bytes = reply["Body"].read()
            return content

        return self._call(fetch)

    def write(self, url: str, path: Path) -> None:
        """Upload a file, a large one in parts."""
        from boto3.exceptions import S3UploadFailedError

        target = _object(url)

        def upload() -> None:
            try:
                self._client.upload_file(str(path), target["Bucket"], target["Key"])
            except S3UploadFailedError as error:
                raise error.__context__ or error from None

        self._call(upload)

    def remove(self, url: str) -> None:
        """Delete the object."""
        self._call(lambda: self._client.delete_object(**_object(url)))

    def _call(self, call: Callable[[], T]) -> T:
        from botocore import exceptions

        try:
            return call()
        except exceptions.ClientError as error:
            raise self._refused(error) from error
        except exceptions.NoCredentialsError as error:
            raise RemoteError("no AWS key was found in the environment") from error
        except (exceptions.BotoCoreError, OSError) as error:
            passing = isinstance(error, exceptions.HTTPClientError | OSError)
            message = f"the bucket cannot be reached: {' '.join(str(error).split())}"
            raise RemoteError(message, passing=passing) from error

    def _refused(self, error: Any) -> RemoteError:
        """Return the error for a status code of the server."""
        reply = error.response
        status = int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(reply.get("Error", {}).get("Code", ""))
        if code == "NoSuchBucket":
            return RemoteError("there is no such bucket", missing=True)
        if status == 404:
            return RemoteError("there is no such file", missing=True)
        if status == 412:
            return RemoteError(CHANGED)
        if status in (401, 403):
            key = "this key may not read or write it" if self._signed else "no AWS key was found"
            return RemoteError(f"the bucket refuses it ({status} {code}): {key}")
        return RemoteError(f"the bucket answers {status} {code}", passing=status in _PASSING)


def _split(url: str) -> tuple[str, str]:
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key


def _object(url: str) -> dict[str, str]:
    bucket, key = _split(url)
    return {"Bucket": bucket, "Key": key}
