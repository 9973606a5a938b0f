"""Programs killed at every step and at random, power, disks and a Hub that fail, hosts that see late: what is lost, and
what the next run makes of it.

``steps`` is what is done to a store, ``calls`` sees how it is written, ``hosts`` is a volume that two hosts have
mounted; ``kills``, ``power``, ``faults``, ``rollouts`` and ``visibility`` are the parts, which ``make campaign`` runs
for long.
"""
