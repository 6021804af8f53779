"""What a step needs besides the model: the layout of its batch, what goes up and what comes down,
log probabilities and noise."""
