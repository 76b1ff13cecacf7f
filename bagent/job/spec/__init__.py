"""The definition of a job file: one model for each section."""
