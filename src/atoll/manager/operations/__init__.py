"""What is done to sandboxes: each is written down first, done by a task of the manager, and written down again."""
