"""What engines report about themselves, and the local engine."""
