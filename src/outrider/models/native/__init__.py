"""The ``native`` runtime: Llama-shaped models at memory speed, the same bits in any company."""
