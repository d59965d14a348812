"""The machine that runs kernel bodies in NumPy and checks them for races."""
