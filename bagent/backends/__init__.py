"""Wire protocols of model servers.

What distinguishes providers and engines is in the table of :mod:`bagent.backend_kinds`, which all
packages use. To add a provider, Gemini say:

1. Its name in ``BackendKind`` and an entry in that table. This is all for a server that speaks
   OpenAI's protocol.
2. For another protocol: a module here like ``anthropic``, for request bodies, replies and sending,
   with its function in ``registry``.
3. Prices in ``bagent/money/prices.json``.
4. If it has a batch service: a module in :mod:`bagent.batches`, called by
   :func:`bagent.runs.provider_batches.make_service`.
5. Tests: a wire in ``tests/support/provider_protocols.py`` and a line in
   ``tests/support/provider_calls.py``, with which ``tests/backends/test_every_provider.py`` runs.

registry        the backend of each kind; what each does not support
base            the interface between the fleet and a backend
request         a model call, independent of the wire format
endpoint        a server's address and capabilities
profile         what each endpoint accepts, learned from its responses
keys            API keys
failures        which failure a status or an error body is, for all providers
wrappers        newer keys after a refusal; backends without groups
messages        chat messages as alternating turns, for Anthropic and Bedrock
prefix_cache    prompt prefixes to mark for explicit caches
openai          chat, completions, embeddings, responses; also for engines and gateways
anthropic       the Messages API
bedrock         the Converse API, through boto3
batching        requests of several rows
engines         probes and load of engines, and the local one
http            the HTTP clients that all but Bedrock use
"""
