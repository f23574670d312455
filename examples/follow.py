#!/usr/bin/env python3
"""Follows the hot list that a process serves with serve_feed. Usage: follow.py DIR [UNTIL_KEY]"""
import json, os, socket, sys

path = os.path.join(sys.argv[1], "feed.sock")
until = sys.argv[2] if len(sys.argv) > 2 else None
feed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
try:
    feed.connect(path)
except OSError as e:
    sys.exit(f"nobody serves a hot list at {path}: {e.strerror}")
lines = feed.makefile("rw", encoding="utf-8")

def send(message):
    lines.write(json.dumps(message) + "\n")
    lines.flush()

send({"hello": {"pid": os.getpid()}})
for line in lines:
    message = json.loads(line)
    if "list" not in message:
        continue  # a heartbeat: the list in force stays in force
    hot = message["list"]
    send({"ack": {"incarnation": hot["incarnation"], "version": hot["version"]}})
    print(f"version {hot['version']}: {len(hot['entries'])} hot keys", flush=True)
    for e in hot["entries"]:
        print(f"  {e['key']}: {e['reads_per_sec']:.0f} reads/s, {e['treatment']}", flush=True)
    if until in [e["key"] for e in hot["entries"]]:
        break
