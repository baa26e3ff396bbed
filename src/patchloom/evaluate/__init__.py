"""Evaluation protocols: every number beside its controls, with a sentence on what was done."""
