"""Vectors of every image as files for other programs: Parquet, npz or safetensors, one file or parts in a folder."""
