"""The caches of attention layers on the device: planes of rows, and the stores that own them."""
