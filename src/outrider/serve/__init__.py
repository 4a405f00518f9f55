"""An OpenAI-style server over the batch engine; needs the extra ``serve``."""
