"""What a model's config.json says, as values that are checked. Imports no torch."""
