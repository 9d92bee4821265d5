"""The database and everything that must balance. Functions take an open transaction, the clock and the run's rules."""
