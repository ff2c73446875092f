"""What makes and destroys sandboxes. An engine is a life cycle plus a byte stream; `base` is the contract."""
