"""Wire protocols of model servers: one package for each protocol, and what they share."""
