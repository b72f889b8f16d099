"""Checks of the cut on any model: is an extracted network what the full one is without the dropped channels?"""
