"""Bytes from outside, altered at random: ``targets`` has each of the parsers, ``make fuzz`` runs them for long."""
