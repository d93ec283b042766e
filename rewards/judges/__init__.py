"""Rewards by a vision-language model as judge."""
