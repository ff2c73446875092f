"""How the tables came to be, step by step. A new step is a new file in `versions`."""
