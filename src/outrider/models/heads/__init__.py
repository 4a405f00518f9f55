"""Draft heads: small networks that read a target's hidden states."""
