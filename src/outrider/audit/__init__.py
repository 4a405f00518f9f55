"""Is the law kept? By enumeration where the model is a toy, by statistics where it is real.

``exact`` walks every course of chance; ``sampled`` draws from both sides and hands the samples
to ``statistics``, or compares token by token where the rule promises equal tokens.
"""
