"""Engines: what turns leases into completions. One interface, several implementations."""
