"""How much memory there is, and what the engine may take of it."""
