"""What commands print: tables, hosts, load tests, the reference."""
