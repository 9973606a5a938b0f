"""Programs killed at every step and at random, power, disks and a Hub that fail: what is lost, and what the next run
makes of it.

``steps`` is what is done to a store, ``calls`` sees how it is written, ``kills``, ``power``, ``faults`` and
``rollouts`` are the parts, and ``make campaign`` runs them for long.
"""
