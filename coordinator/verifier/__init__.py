"""Verification: every verdict comes from one batched prefill on trusted hardware."""
