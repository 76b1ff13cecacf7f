"""S3 and Bedrock's batch jobs as one scripted server, for real boto3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from support.batch_services import BatchServer

Json = Any
ROLE = "arn:aws:iam::123456789012:role/batch"


@dataclass
class Job:
    """How one job goes: a word for each look, the last repeating.

    ``answers`` is how many records are answered, None for all; ``errors`` are records with an
    error; ``refuse`` answers the making of it: status, exception, words.
    """

    words: Sequence[str] = ("Submitted", "Validating", "Scheduled", "InProgress", "Completed")
    answers: int | None = None
    errors: tuple[int, ...] = ()
    message: str = ""
    refuse: tuple[int, str, str] | None = None


class AwsServer(BatchServer):
    """S3's objects by ``bucket/key`` in ``objects``, and Bedrock's batch jobs."""

    ENDED = ("Completed", "PartiallyCompleted", "Stopped", "Expired")

    def __init__(self, *script: Job) -> None:
        super().__init__(script, Job())
        self.objects: dict[str, bytes] = {}

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add jobs and S3."""
        router.add_post("/model-invocation-job", self._create)
        router.add_get("/model-invocation-jobs", self._list)
        router.add_get("/model-invocation-job/{id:.*}", self._get)
        router.add_post("/model-invocation-job/{id:.*}/stop", self._cancel)
        router.add_put("/{bucket}/{key:.*}", self._put)
        router.add_get("/{bucket}/{key:.*}", self._read)
        router.add_get("/{bucket}", self._read)

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self.batch_of(request)
        if self.status_of(job) in self.ENDED:
            return _refused(409, "ConflictException", "it has ended")
        self.cancels += 1
        job["course"] = Job(("Stopping", "Stopping", "Stopped"), answers=len(job["lines"]) // 2)
        self._looks[job["id"]] = 0
        return web.json_response({})

    async def _put(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.objects[f"{request.match_info['bucket']}/{request.match_info['key']}"] = body
        return web.Response(headers={"ETag": '"e"'})

    async def _read(self, request: web.Request) -> web.Response:
        bucket, key = request.match_info["bucket"], request.match_info.get("key", "")
        if key:
            return web.Response(body=self.objects[f"{bucket}/{key}"])
        prefix = f"{bucket}/{request.query.get('prefix', '')}"
        keys = [k.partition("/")[2] for k in self.objects if k.startswith(prefix)]
        listed = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
        return web.Response(
            text=f"<ListBucketResult><Name>{bucket}</Name>{listed}</ListBucketResult>",
            content_type="application/xml",
        )

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        course = self.next_course()
        if course.refuse is not None:
            return _refused(*course.refuse)
        for job in self.made:
            if job["clientRequestToken"] == asked["clientRequestToken"]:
                return web.json_response({"jobArn": job["jobArn"]})
        source = asked["inputDataConfig"]["s3InputDataConfig"]["s3Uri"].removeprefix("s3://")
        lines = [json.loads(line) for line in self.objects[source].decode().split("\n") if line]
        if len(lines) < 100:
            self.complaints.append(f"only {len(lines)} records")
        if asked["modelInvocationType"] != "Converse" or asked["roleArn"] != ROLE:
            self.complaints.append(f"not what was asked for: {asked}")
        if any(len(line["recordId"]) != 11 for line in lines):
            self.complaints.append("a recordId has 11 characters")
        if any("modelId" in line["modelInput"] for line in lines):
            self.complaints.append("modelId is no member of the body")
        arn = f"arn:aws:bedrock:us-east-1:123456789012:model-invocation-job/j{len(self.made)}"
        self.made.append({**asked, "id": arn, "jobArn": arn, "lines": lines, "course": course})
        return web.json_response({"jobArn": arn})

    def _shown(self, job: Json) -> Json:
        course, word = job["course"], self.status_of(job)
        shown = {k: v for k, v in job.items() if k not in ("id", "lines", "course")}
        shown |= {"status": word, "submitTime": "2026-11-28T10:00:00Z", "message": course.message}
        if word in self.ENDED:
            self._write(job, course)
            shown |= {"endTime": "2026-11-28T11:00:00Z", "totalRecordCount": len(job["lines"])}
            shown["processedRecordCount"] = len(job["lines"])
        return shown

    def _write(self, job: Json, course: Job) -> None:
        out = job["outputDataConfig"]["s3OutputDataConfig"]["s3Uri"].removeprefix("s3://")
        folder = f"{out}{job['jobArn'].rpartition('/')[2]}"
        name = job["inputDataConfig"]["s3InputDataConfig"]["s3Uri"].rpartition("/")[2]
        answers = []
        for number, line in enumerate(job["lines"][: course.answers]):
            if number in course.errors:
                error = {"errorCode": 400, "errorMessage": "The request is not valid"}
                answers.append({**line, "error": error})
                continue
            text = {"text": f"answer {number}"}
            output = {
                "output": {"message": {"role": "assistant", "content": [text]}},
                "stopReason": "end_turn",
                "usage": {"inputTokens": 9, "outputTokens": 2, "totalTokens": 11},
            }
            answers.append({**line, "modelOutput": output})
        self.objects[f"{folder}/{name}.out"] = "\n".join(map(json.dumps, answers)).encode()
        self.objects[f"{folder}/manifest.json.out"] = b'{"totalRecordCount":1}'

    async def _list(self, request: web.Request) -> web.Response:
        name = request.query.get("nameContains", "")
        found = [self._shown(job) for job in self.made if name in job["jobName"]]
        return web.json_response({"invocationJobSummaries": found})


def _refused(status: int, kind: str, words: str) -> web.Response:
    return web.json_response({"message": words}, status=status, headers={"x-amzn-ErrorType": kind})
