"""Export of encoders to timm, ONNX and the Hugging Face Hub, with a check of each exported file."""
