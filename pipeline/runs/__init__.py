"""What both engines say of a run: its state, its graph, its progress on a terminal, its tables."""
