"""What survives? The journal first, then the tables made from it."""
