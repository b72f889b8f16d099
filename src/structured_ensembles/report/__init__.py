"""Figures and pages of finished runs."""
