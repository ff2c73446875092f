"""The log of a server: lines of JSON, or text for people, on stderr.

structlog makes every line, also those of the layers below, which use `logging`, and of uvicorn. `contents` is what
lines may contain, `request_context` whom they are about, and `log_writer` writes them without holding anything up.
"""
