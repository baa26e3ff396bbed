"""What has parameters: the encoder (a guest from timm), decoders and heads."""
