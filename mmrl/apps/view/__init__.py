"""Serves run folders to a browser while they are written: live reports, galleries, and a page on
which a person rates pairs. Start with ``command``."""
