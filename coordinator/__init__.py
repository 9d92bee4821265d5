"""The trusted side: problems, ledger, verifier, trainer and the HTTP edge in front of them."""
