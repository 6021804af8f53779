"""From a submission to a Request that cannot be wrong: all checks and defaults. Imports no
torch."""
