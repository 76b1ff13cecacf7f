"""Helpers of the tests. All of them live here; which to use when:

Servers that a test scripts, all on 127.0.0.1:

- An OpenAI-compatible server: ``fake_server.FakeServer`` (fixture ``fs``) with ``replies``: what
  each row gets, attempt by attempt. It records requests and finds faults in them.
- A hosted provider or an engine in its own protocol (OpenAI, Anthropic, Bedrock, vLLM, SGLang,
  Dynamo): ``provider_server`` with the protocols of ``provider_protocols`` and
  ``provider_bedrock``.
- A provider's batch service: ``batch_services`` (OpenAI, Anthropic), ``aws_batches`` (Bedrock).
- An engine that behaves as under load (queues, speed, caches, loads of instances): ``bagent sim``;
  ``simulated_fleets`` starts it in a thread.
- Single routes with fixed answers: ``routes_server``. Bytes on a socket:
  ``backend_calls.raw_server``. Your own aiohttp application: ``http_servers``.
- A proxy on the way: ``FakeServer`` as well; ``target`` of a request is the URL that it got.
- HTTPS with a CA of one's own: ``tls``.

Without a network, on a clock that the test sets: ``scripted_fleet``, ``cached_fleets``,
``queueing_engine`` and ``jumping_loop`` (fleet), ``tiny_engine`` (chat templates, grouping),
``batch_runs`` (batches).

Commands and jobs: ``cli`` (fixture ``bagent``) runs a command in the test's own process, or in a
fork of a warm one (``fork_server``) for tests with the marker ``process``; tables wait for a reader
but for tests with the marker ``tables``, and ``run.duckdb`` is made for those with the marker
``database`` alone; ``jobs`` writes jobs and reads results;
``agent_jobs``, ``stage_jobs`` and ``run_outcomes`` do so for agents, stages and whole runs.
``stored_runs`` makes a run directory without a run; ``report_pages`` and ``chromium`` read reports.
``sources`` holds the texts and syntax trees of the package.
"""
