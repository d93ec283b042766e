"""Engines that sample answers for a vision-language policy."""
