"""The pure core: numbers in, numbers out; no models, no input or output."""
