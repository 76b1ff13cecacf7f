"""What will this job cost and share? A look at a job without a generation.

::

    look       from options to a report: the order of everything below
    servers    which endpoints would answer, and what they tell of themselves
    sample     the first rows as the requests that would be sent
    volume     how many rows there are, counted or estimated by bytes
    tokens     how many tokens their prompts have, by the server's tokenizer or by characters
    estimate   from the sample to all rows: tokens, cost, rows that do not fit
    sharing    what a prefix cache can reuse
    warming    whether one request should go ahead where a cache is cold
    pieces     a template cut into what is fixed and what differs by row
    reorder    the template with the fixed text first
    report     the result as plain records
    text       the result as text for people
"""
