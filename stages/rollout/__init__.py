"""Moving traffic to a release step by step, and back."""
