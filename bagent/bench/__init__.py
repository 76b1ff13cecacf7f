"""Load tests of a fleet.

plan            settings of a load test, sizes of prompts, and the stages that they make
schedule        load stages, their send times, and recorded loads to replay
workload        requests of a stage: prompts of a given length, or rows of a job
client          one request and its timings; calibration of prompt lengths
routing         choice of an endpoint for each request
load_generator  one worker: sends its share of each stage
workers         the workers of a test, in this process or as processes of their own
runner          a load test from the health check to its results
sweep           search for the saturation of a fleet
monitors        lag of the client, counters of the servers
records         raw rows, one for each request, and their tables in DuckDB
metrics         numbers of a load test, by SQL over the raw rows (percentiles are never averaged)
verdict         which endpoints are slow, failing or dead
summary         ``summary.json``
thresholds      ``--fail-if`` and ``--compare``
"""
