"""How many tokens to draft in a round, decided before anything is drawn."""
