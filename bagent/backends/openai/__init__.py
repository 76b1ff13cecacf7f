"""OpenAI's wire protocol.

backend           sending, counting tokens, asking for models
chat, stream      bodies and replies of chats and completions, whole and streamed
responses         bodies and replies of ``/v1/responses``, whole and streamed
responses_server  the same from the server's side: its requests as chats, chats as its answers
embeddings        replies of ``/v1/embeddings``
raw_request       bodies written by the user, such as the lines of a batch file
models            model lists
"""
