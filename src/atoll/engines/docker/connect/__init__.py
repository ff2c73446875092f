"""Ways into a container: the streams to its agent, and its link to the gateway."""
