"""The engine: one sequence at a time, round after round."""
