"""The key-value cache: pages of tokens, handed out to sequences."""
