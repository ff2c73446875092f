"""The values that the service takes and gives, as they go over the wire; one module for each noun."""
