"""Output schemas: loading, bundling, dialects, and the table columns they define."""
