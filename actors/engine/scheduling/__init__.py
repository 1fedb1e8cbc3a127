"""Which sequences have slots, which of them a round advances, and how prompts are prefilled."""
