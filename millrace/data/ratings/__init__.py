"""What users think of items: read from text, kept as a sparse matrix, split by time."""
