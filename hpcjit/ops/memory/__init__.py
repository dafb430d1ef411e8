"""Copies, gathers and transposes of plain memory."""
