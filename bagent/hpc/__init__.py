"""Supercomputers: where this process runs, when its job ends, and the batch script of a job.

:mod:`bagent.hpc.allocation` is the one place that reads the variables of schedulers and
launchers; everything else asks it.
"""
