"""A user's JSON Schema.

- ``schema``: :class:`OutputSchema`
- ``bundle``: one document out of files that refer to each other, and which files may be read
- ``dialects``: keywords of the drafts, and the rules of OpenAI's strict mode
- ``columns``: columns of the answers table
"""
