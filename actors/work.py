"""What an actor is handed of each row, in columns beside those that are carried. Imports nothing heavy."""

# Prompt ids, and how many were cut off before them, or an error; whether the row stays as it is; and its own settings,
# of which those that tell how tokens are chosen are JSON.
WORK = ("_prompt", "_cut", "_error", "_skip", "_max_new_tokens", "_sampling", "_stop")
