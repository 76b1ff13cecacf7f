"""What commands print.

tables     rows as tables, CSV or JSON lines
hosts      checked endpoints
bench      a load test
reference  the reference of options, keys, tables and codes
"""
