"""Runtimes, and what it takes to find, check and load a model."""
