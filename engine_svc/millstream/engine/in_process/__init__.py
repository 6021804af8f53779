"""What LLM needs that the services do not: the engine in a process of the user."""
