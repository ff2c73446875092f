"""The engine `remote`: an Atoll server makes the sandboxes, and hands over the byte stream of their agents."""
