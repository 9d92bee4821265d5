"""Weights to everyone: publish, relay, fetch, patch."""
