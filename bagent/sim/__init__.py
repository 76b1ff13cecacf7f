"""A simulated OpenAI-compatible serving engine, for people without a GPU.

It batches continuously, prefills, decodes, fills a KV cache, reuses prefixes, queues and fails as
it is told, on the routes and in the words of vLLM, and its answers are seeded: valid for the
schema that a request gives, else words. Nothing in it is a language model, and every answer's
model name says so.
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
