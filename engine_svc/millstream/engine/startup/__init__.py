"""How the core process and the runner in it start, and where the time goes."""
