"""Reading Dockerfiles: pure, without any file or network."""
