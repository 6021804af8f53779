"""What the front end process does beside service.py: streams and their RPCs, admission, and its
side of the core process. Imports no torch."""
