"""Encoders from timm, decoders and heads: everything with parameters."""
