"""Holds the engines that sample answers for a vision-language policy."""
