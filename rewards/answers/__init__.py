"""Scores text answers against ground truths in the prompt: one reader, one coordinate module, NaN
only where the prompt is at fault; ``docs/verifiable-rewards.md`` has the table."""
