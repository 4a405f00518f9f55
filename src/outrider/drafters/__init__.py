"""Drafters, one a file: each proposes tokens, none can change the target's law."""
