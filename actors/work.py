"""What an actor is handed of each row, in columns beside those that are carried. Imports nothing heavy."""

# Prompt ids or an error; whether the row stays as it is; and its own settings, how tokens are chosen as JSON.
WORK = ("_prompt", "_error", "_skip", "_max_new_tokens", "_sampling", "_stop")
