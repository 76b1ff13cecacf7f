"""Text helpers.

- ``csv``: rows as CSV
- ``durations``: durations such as ``1h30m``
- ``json``: JSON text in and out
- ``suggest``: suggestions for misspelled names, short descriptions of values
- ``terminal``: output that foreign text cannot control
- ``unicode``: valid UTF-8 and JSON values
"""
