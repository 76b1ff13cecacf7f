"""The tools that come with bagent."""
