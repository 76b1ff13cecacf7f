"""``python -m bagent``."""

from bagent.cli.app import run_and_exit

run_and_exit()
