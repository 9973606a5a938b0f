"""What both engines share about a run: its state, its graph, its progress on a terminal, its tables."""
