"""OpenAI's wire protocol.

backend              sending, counting tokens, asking for models
chat, stream         bodies and replies of chats and completions, whole and streamed
tool_call_assembler  tool calls out of chunks
responses            replies of ``/v1/responses``, whole and streamed
responses_request    bodies of ``/v1/responses``
response_events      answers in the form of responses, for servers
chat_from_responses  chats made of requests to ``/v1/responses``
embeddings           replies of ``/v1/embeddings``
raw_request          bodies written by the user, such as the lines of a batch file
models               model lists
tokenize             token counts from ``/tokenize``
errors               HTTP errors as failures
"""
