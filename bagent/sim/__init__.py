"""A simulated OpenAI-compatible serving engine for machines without a GPU.

It batches continuously, prefills, decodes, fills a KV cache, reuses prefixes, queues, and fails as
configured, on vLLM's routes and with vLLM's messages. Answers are seeded and valid for the
request's schema. Nothing in it is a language model, and every answer's model name says so.

config           settings and injected faults
engine           continuous batching and the KV cache, on a clock that the caller provides
metrics          counters in vLLM's Prometheus format
driver           the engine on an event loop; requests read for one replica
requests         request bodies, checked as vLLM checks them
generator        answers; schema_values and text make their values
tokens           tokenizer and chat template
replies          response bodies and stream chunks
other_protocols  OpenAI's responses and Anthropic's messages
server           HTTP server of each replica
"""

from bagent.sim.config import (
    OPTIONS,
    AnswerConfig,
    EngineConfig,
    FaultConfig,
    SimConfig,
    parse_sim_url,
)
from bagent.sim.server import RunningSim, start_sim

__all__ = [
    "OPTIONS",
    "AnswerConfig",
    "EngineConfig",
    "FaultConfig",
    "RunningSim",
    "SimConfig",
    "parse_sim_url",
    "start_sim",
]
