"""The pages of ``bagent view``: runs, one run, its rows, one row, two runs compared.

- ``server``: routes and access control; ``handlers``: what each address answers
- ``tables``: the tables of a run, renewed while it goes on; ``catalog``: the runs that are served
- ``filters``, ``rows``: which rows are listed, and the list, its pages and its export
- ``row``: everything about one row, with its prompt
- ``compare``: two runs row by row

The templates escape by :mod:`bagent.report.html`.
"""
