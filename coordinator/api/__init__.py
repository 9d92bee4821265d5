"""The HTTP edge of the coordinator (/v1)."""
