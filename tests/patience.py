"""How long a test waits for a process before it takes it to hang.

No test is timed: a busy machine may take minutes for what takes seconds on a quiet one, the first
load of the default model above all, which packs weights and compiles the program.
"""

HANGS_S = 900.0
