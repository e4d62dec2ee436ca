"""The miller: what happens around and between runs of the compiled program."""
