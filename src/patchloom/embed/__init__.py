"""Vectors of every image as a file that other programs read: Parquet, npz or safetensors."""
