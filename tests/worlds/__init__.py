"""Simulated worlds: the real composition of a run on simulated machines, servers and disks."""
