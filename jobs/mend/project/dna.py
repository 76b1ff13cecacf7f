"""Strands of DNA."""

PAIRS = {"A": "T", "C": "G", "G": "C", "T": "A"}


def reverse_complement(strand: str) -> str:
    """The other strand, read in its own direction."""
    return "".join(PAIRS[base] for base in strand)
