"""Finds rewards, checks the data for them, and calls them."""
