"""The wheel: everything that is compiled. Pure functions over plain data."""
