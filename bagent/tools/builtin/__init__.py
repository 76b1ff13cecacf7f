"""The tools that come with bagent.

loader          the tools that a job names
http_get        pages, from allowed hosts
web_search      Brave Search and SerpAPI
host_allowlist  the hosts that tools may connect to
read_file       text files below a folder
sql             queries over data files
code            ``python_eval`` and ``shell``
"""
