"""The definition of a job file: one model for each section.

job          the whole file
backend      the server
prompt       prompts and input
output       answer schema, sampling, batching, results
limits       limits and prices
agent        agents and tools
stages       stages and topologies
cluster      batch jobs
types        what sections share: types of values; unknown keys, blank keys
paths        files and folders
json_schema  the JSON Schema of job files
"""
