"""Withholding: pure functions without parameters that remove parts of the input. Read `encoder_input` first."""
