"""Forms of answers (labels, JSON, free text): what requests ask of the engine, and how completions are read."""
