"""``python -m bagent``."""

from bagent.cli.main import run_and_exit

run_and_exit()
