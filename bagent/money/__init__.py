"""What answers cost: known prices, each with its source, and a run's spending against its budget.

Prices are dollars per million tokens. What is not known stays unknown: None, never 0.
"""
