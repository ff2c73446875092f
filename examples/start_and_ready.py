"""A sandbox with a web server that is ready when `create` returns, and that is started again when it dies.

python examples/start_and_ready.py
"""

import time

from atoll import Sandbox, StartError

WEB = {"name": "web", "command": "exec python3 -m http.server 8000 --bind 127.0.0.1"}
ASK = "python3 -c \"import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/').status)\""

with Sandbox(start=[WEB], ready={"port": 8000, "path": "/", "timeout": 30}) as sandbox:
    print("it answers", sandbox.exec(ASK).stdout.strip())
    sandbox.command("web").kill(15)
    while sandbox.start_commands()[0].restarts == 0:
        time.sleep(0.05)
    print("it was started again:", sandbox.start_commands()[0])

try:
    Sandbox(start=["echo the disk is missing >&2; exit 1"], ready={"port": 8000, "timeout": 1}).create()
except StartError as error:
    print(error)
