"""What commands print: tables, endpoints, load tests, the job in a report, the reference."""
