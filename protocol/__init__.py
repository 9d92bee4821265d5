"""What crosses the wire: identities, signatures, messages, reason codes, seeds. Imports nothing else of farflung."""
