"""The local engine: runs the compiled Argo manifest on this machine, each container's command as a subprocess.

manifest → workflow (all mistakes at once) → engine (what fits runs, the rest waits) → run.json, logs/
"""
