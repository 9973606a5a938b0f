"""Programs killed at every step and at random, and power that fails: what is lost, and what the next run makes of it.

``steps`` is what is done to a store, ``calls`` sees how it is written, ``kills``, ``power`` and ``rollouts`` are the
parts, and ``make campaign`` runs them for long.
"""
