"""The untrusted side: engines, synchronisation of weights, the spool and the worker that ties them together."""
