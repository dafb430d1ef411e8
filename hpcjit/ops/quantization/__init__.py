"""Conversion to FP8 and other narrow formats."""
