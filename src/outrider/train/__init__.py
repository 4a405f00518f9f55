"""Fitting a draft to its target: data, losses, trainer, export."""
