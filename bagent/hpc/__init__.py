"""Supercomputers: allocations, batch scripts and what they run on each node.

- :mod:`~bagent.hpc.schedulers`: a class for each scheduler, and how to add one.
- :mod:`~bagent.hpc.allocation`: the batch job around a process, its nodes, and a process on each.
- :mod:`~bagent.hpc.site`, :mod:`~bagent.hpc.plan`, :mod:`~bagent.hpc.script`: from a job to a
  batch script.
- :mod:`~bagent.hpc.staging`, :mod:`~bagent.hpc.engines`, :mod:`~bagent.hpc.startup`: the steps of
  the script.
- :mod:`~bagent.hpc.parsl`, :mod:`~bagent.hpc.interchange`: workers of ``--executor parsl``.
"""
