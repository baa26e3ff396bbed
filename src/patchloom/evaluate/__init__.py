"""Evaluation protocols, each with its controls and a description of what was done."""
