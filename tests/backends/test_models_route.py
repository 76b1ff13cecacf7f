"""The list of models of a provider that is busy."""

from __future__ import annotations

import asyncio
import itertools
import time

from aiohttp import web

from support.backend_calls import backend, endpoint


def listed(refusals, own, told=None):
    """What a probe of a provider comes to that refuses its list so often; when it was asked."""
    asked = []

    async def answer(request):
        asked.append(time.monotonic())
        if len(asked) <= refusals:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers=told)
        return web.json_response({"data": [{"id": "m-1"}]})

    async def main():
        app = web.Application()
        app.router.add_get("/v1/models", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with backend() as found:
            result = await found.probe(endpoint(url, own=own), 5.0)
        await runner.cleanup()
        return result

    return asyncio.run(main()), asked


def test_a_busy_provider_is_asked_for_its_models_again_and_not_before_it_says():
    found, asked = listed(3, own=False, told={"retry-after-ms": "120"})
    assert found.models == ("m-1",)
    assert len(asked) == 4
    assert all(later - before >= 0.12 for before, later in itertools.pairwise(asked))


def test_a_provider_that_names_too_late_a_time_for_its_models_is_not_asked_again():
    found, asked = listed(9, own=False, told={"Retry-After": "30"})
    assert (found.kind, len(asked)) == ("rate_limited", 1)


def test_an_engine_of_ones_own_that_refuses_its_models_is_asked_once():
    found, asked = listed(1, own=True)
    assert (found.kind, len(asked)) == ("rate_limited", 1)
