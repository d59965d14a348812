"""The language that kernel bodies are written in, and the two machines that run it."""
