"""A model over several processes: how they start, meet, get their plans and sample together."""
