"""Asynchronous off-policy training: assign, step, durable checkpoint, publish, confirm."""
