"""What commands print.

tables      rows as tables, CSV or JSON lines
hosts       checked endpoints
bench       a load test
report_job  the job on the page of a run
reference   the reference of options, keys, tables and codes
"""
