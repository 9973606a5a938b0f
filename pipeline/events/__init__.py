"""Runs that a push to a registry starts: the Sensor's mapping, and the receiver in front of it."""
