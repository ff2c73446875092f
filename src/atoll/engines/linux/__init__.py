"""The engines `native` and `oci`, which make sandboxes from Linux namespaces: their common plan and parts."""
