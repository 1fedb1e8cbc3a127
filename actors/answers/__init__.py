"""Labels and JSON: what is asked of the engine, and what is read out of its completions."""
