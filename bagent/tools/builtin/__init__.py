"""The tools that come with bagent.

http_get    pages, from allowed hosts
web_search  Brave Search and SerpAPI
read_file   text files below a folder
sql         queries over data files
code        ``python_eval`` and ``shell``
"""
