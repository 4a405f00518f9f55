"""Outrider inside other libraries."""
