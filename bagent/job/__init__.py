"""The job file, its options and its templates: parsed, validated, immutable.

- ``load``: :func:`load.load_job`, from file and options to a :class:`spec.job.Job`; OpenAI batch
  files
- ``yaml``: YAML 1.2 with positions
- ``overrides``, ``env_substitution``: ``--set`` and named options, ``${VAR}``
- ``spec``: the definition of a job file
- ``validation``: validation errors, and positions in texts
- ``templates``: prompt templates
- ``files``: prompt, schema and tool files
- ``fingerprint``: hashes of the parts that change answers
- ``redaction``: masked secrets
"""
