"""Decoders: each a generator of accepted tokens over a model and its state."""
