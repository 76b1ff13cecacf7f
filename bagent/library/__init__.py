"""How do other programs use bagent? The names that :mod:`bagent` itself offers."""
