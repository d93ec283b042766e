"""Serves run folders to a browser while they are written: live reports, galleries, and a page to
rate pairs. Start with ``command``."""
