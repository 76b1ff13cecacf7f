"""S3 and Bedrock's batch jobs as one scripted server, for real boto3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web

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


class AwsServer:
    """Follows ``script`` job by job, the last one repeating.

    Attributes:
        objects: S3's objects by ``bucket/key``.
        made: the jobs that were made.
        complaints: what AWS would have refused.
    """

    def __init__(self, *script: Job) -> None:
        self.script = list(script) or [Job()]
        self.objects: dict[str, bytes] = {}
        self.made: list[Json] = []
        self.tries = 0
        self.complaints: list[str] = []
        self.stops = 0
        self._steps: dict[str, int] = {}

    def app(self) -> web.Application:
        """The server as an application."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/model-invocation-job", self._create)
        app.router.add_get("/model-invocation-jobs", self._list)
        app.router.add_get("/model-invocation-job/{arn:.*}", self._get)
        app.router.add_post("/model-invocation-job/{arn:.*}/stop", self._stop)
        app.router.add_put("/{bucket}/{key:.*}", self._put)
        app.router.add_get("/{bucket}/{key:.*}", self._read)
        app.router.add_get("/{bucket}", self._read)
        return app

    async def _stop(self, request: web.Request) -> web.Response:
        """The second half of the job gets no answers."""
        arn = unquote(request.match_info["arn"])
        (job,) = [one for one in self.made if one["jobArn"] == arn]
        if self._shown(job)["status"] in ("Completed", "Stopped", "Expired"):
            headers = {"x-amzn-ErrorType": "ConflictException"}
            return web.json_response({"message": "it has ended"}, status=409, headers=headers)
        self.stops += 1
        job["course"] = Job(("Stopping", "Stopping", "Stopped"), answers=len(job["lines"]) // 2)
        self._steps[arn] = 0
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
        course = self.script[min(self.tries, len(self.script) - 1)]
        self.tries += 1
        if course.refuse is not None:
            status, kind, words = course.refuse
            return web.json_response(
                {"message": words}, status=status, headers={"x-amzn-ErrorType": kind}
            )
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
        self.made.append({**asked, "jobArn": arn, "lines": lines, "course": course})
        return web.json_response({"jobArn": arn})

    def _shown(self, job: Json) -> Json:
        course: Job = job["course"]
        word = course.words[min(self._steps.get(job["jobArn"], 0), len(course.words) - 1)]
        shown = {k: v for k, v in job.items() if k not in ("lines", "course")}
        shown |= {"status": word, "submitTime": "2026-11-28T10:00:00Z", "message": course.message}
        if word in ("Completed", "PartiallyCompleted", "Stopped", "Expired"):
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

    async def _get(self, request: web.Request) -> web.Response:
        arn = unquote(request.match_info["arn"])
        (job,) = [one for one in self.made if one["jobArn"] == arn]
        shown = self._shown(job)
        self._steps[arn] = self._steps.get(arn, 0) + 1
        return web.json_response(shown)

    async def _list(self, request: web.Request) -> web.Response:
        name = request.query.get("nameContains", "")
        found = [self._shown(job) for job in self.made if name in job["jobName"]]
        return web.json_response({"invocationJobSummaries": found})
