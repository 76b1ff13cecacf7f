"""Costs: ``prices`` of hosted models, a run's ``budget``, and the ``gpu_time`` of own servers.

Prices are dollars per million tokens. An unknown price or cost is None, never 0.
"""
