"""Provider batch APIs: rows sent as files, answered within a day at half the price.

A batch is written to disk and its id is recorded before anything can be lost. Batches at the
provider survive the end of this process.

service                     the interface of a provider's batch service
openai, anthropic, bedrock  the services
runner                      a stage through batches: fill, send, poll, read, repeat
scheduler                   the next step, as a pure state machine
builder, files              batches being filled, and their files
edited                      rows that were edited while they were in a batch
record                      the ledger of batches
conversations               rows whose calls go into batches, and the answers out of them
http                        the HTTP client of services without an SDK
"""
