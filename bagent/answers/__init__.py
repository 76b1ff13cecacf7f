"""What did it say? A reply becomes a validated value, or a named failure.

::

    judge      Reply -> Verdict: finish reason, then JSON, then the schema
    extract    text -> the JSON value in it, if it is whole
    thinking   inline thinking blocks of models
    decode     strict and mildly lenient JSON reading
    schema     OutputSchema: a user's JSON Schema, loaded, checked, self-contained
    bundle     one document out of schema files that refer to each other
    sources    which files a schema may read
    dialects   what the drafts of JSON Schema call things
    strict     does a schema keep the rules of OpenAI's strict mode?
    columns    the table columns that a schema asks for
    words      what is wrong with a value, for people and for the model
    reask      the messages of a re-ask, and the schema in the prompt
    sanitize   text that is always valid UTF-8

Nothing here does I/O, apart from reading schema files in ``OutputSchema.load``.
"""
