"""Speed: methods side by side, and shapes without weights."""
