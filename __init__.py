"""Large offline LLM generation with exact batch speculative decoding."""
