"""Benchmarks that print JSON and a table. Ships with the wheel, may import everything; nothing imports it."""
