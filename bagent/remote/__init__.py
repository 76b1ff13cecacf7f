"""Files in buckets and on web servers.

urls      URLs of remote files, and patterns over buckets
storage   the protocol of a store, its errors and retries, and local folders to publish to
s3        S3, through boto3
web       http and https, by byte ranges
drivers   gs, az and hf, through fsspec
files     remote files, with the interface of local ones, and for DuckDB
"""

from bagent.remote.files import InputFile, RemoteFile, find_remote_files, open_remote
from bagent.remote.storage import RemoteError, Storage, storage_of
from bagent.remote.urls import (
    bucket_folder,
    check_url,
    in_bucket,
    is_pattern,
    is_remote,
    plain_url,
    publish_problem,
)

__all__ = [
    "InputFile",
    "RemoteError",
    "RemoteFile",
    "Storage",
    "bucket_folder",
    "check_url",
    "find_remote_files",
    "in_bucket",
    "is_pattern",
    "is_remote",
    "open_remote",
    "plain_url",
    "publish_problem",
    "storage_of",
]
