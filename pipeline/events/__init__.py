"""Runs that a push to a registry starts: what the push means, and the receiver of such pushes."""
