"""Distillation of an encoder into any backbone of timm."""
