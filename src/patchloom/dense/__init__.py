"""Segmentation and detection: annotated data, models, training, scores and predictions."""
