"""How does one row become one answer? Turns, tools between them, compaction, programs."""
