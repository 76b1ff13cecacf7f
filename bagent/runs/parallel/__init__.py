"""Several processes that share a run.

workers          `--workers N`: processes of one host
worker           one such process
parsl            `--executor parsl`: chunks for workers that Parsl places
parsl_task       one such chunk
progress_merge   their states as one
"""
