"""The machine that emits MLIR and PTX into a Mosaic GPU kernel."""
