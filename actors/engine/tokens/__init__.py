"""How tokens are chosen: sampling with shared noise, and constraints on the next token."""
