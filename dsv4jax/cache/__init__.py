"""What a cache holds, and who holds what in it: windows, tails, paged entries, tables."""
