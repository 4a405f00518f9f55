"""Acceptance rules, one a file; ``reference`` is the textbook step in plain numpy."""
