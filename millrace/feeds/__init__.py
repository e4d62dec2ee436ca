"""Feeds between host and device: infeeds bring elements in, outfeeds bring results out."""
