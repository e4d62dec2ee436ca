"""Ratings of items by users: read from text, kept as a sparse matrix, split by time."""
