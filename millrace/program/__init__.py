"""Everything that is compiled: pure functions over plain data."""
