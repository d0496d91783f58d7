"""Decoders: each a generator of tokens over a model and its state; `registry` lists them."""
