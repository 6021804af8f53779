"""Rows whose logits are edited before they sample, and what the device keeps for them."""
