"""The links of sandboxes in the kernel: the router's network namespace and its packet filter."""
