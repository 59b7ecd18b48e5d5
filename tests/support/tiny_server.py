"""A server that starts in a tenth of a second and answers /health and /server_info, for tests of its supervisor.

    python tiny_server.py --host H --port N --weight-version LABEL [--mode MODE] [--note PATH]

Modes: `serve`; `crash` (prints two lines and ends with code 3); `silent` (runs, never listens); `stubborn` (ignores
SIGTERM); `port-taken-once` (says so and ends, the first time); `family` (has a child in its process group). What a
test wants to know, as pids, goes to the file `--note`.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--mode", default="serve")
    parser.add_argument("--note", type=Path)
    options = parser.parse_args()
    mode, note = options.mode, options.note
    if mode == "crash":
        print("loading", flush=True)
        sys.exit(_complain("out of luck", 3))
    if mode == "silent":
        note.write_text(str(os.getpid()))
        threading.Event().wait()
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "port-taken-once" and not note.exists():
        note.write_text(str(options.port))
        sys.exit(_complain("[Errno 98] error while attempting to bind: address already in use", 1))
    if mode == "family":
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import threading; threading.Event().wait()"])
        note.write_text(str(child.pid))
    serve(options.host, options.port, options.weight_version)


def _complain(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


def serve(host: str, port: int, weight_version: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"weight_version": weight_version, "pid": os.getpid()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    Server((host, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
