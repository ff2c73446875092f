"""Exposed ports: HTTP and WebSockets to what listens inside a sandbox, by path and by host name.

What comes back is from the untrusted side. By path it shares a host with the API, so the browser is told to give it no
origin at all. By host name it has an origin of its own, where the API is not.
"""
