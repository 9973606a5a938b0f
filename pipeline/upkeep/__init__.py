"""The upkeep of a store over years: what it holds, what may be removed, whether it is sound, and its backups."""
