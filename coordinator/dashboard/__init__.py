"""One page that shows a run while it happens. Aggregates only: no gold, no key, no address, no problem in use."""
