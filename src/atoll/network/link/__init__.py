"""The kernel's side of sandbox networks: links, the router's network namespace and its packet filter."""
