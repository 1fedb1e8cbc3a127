"""The columns that an actor reads from each row, beside the carried ones. Imports neither torch nor transformers."""

# Prompt ids and how many were cut off before them, or an error; whether the row stays unchanged; and the row's own
# settings, where `_sampling` holds the sampling settings as JSON.
WORK = ("_prompt", "_cut", "_error", "_skip", "_max_new_tokens", "_sampling", "_stop", "_logprobs", "_given",
        "_samples", "_adapter")  # fmt: skip
