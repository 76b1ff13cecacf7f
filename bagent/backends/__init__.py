"""How do I speak to it? One module for each wire protocol, and what they share."""
