"""Replies to validated values, or named failures.

- ``evaluate``: reply to :class:`AnswerResult`: finish reason, then JSON, then schema
- ``extract``: the JSON value in an answer's text, strict and lenient decoding
- ``reasoning``: reasoning inside the text of an answer
- ``messages``: validation errors as one-line messages, messages that ask again, the schema in the
  prompt; :mod:`bagent.agents.conversation` decides when to ask
- ``schema``: a user's JSON Schema: loaded, checked, self-contained, as table columns
"""
