"""Embeddings of images as Parquet, npz or safetensors files."""
