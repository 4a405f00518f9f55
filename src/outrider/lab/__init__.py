"""Measuring: what speculation costs and gains on this machine, and what pays best."""
