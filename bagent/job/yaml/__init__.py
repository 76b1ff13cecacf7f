"""The YAML 1.2 reader that knows the line and column of every key and value."""
