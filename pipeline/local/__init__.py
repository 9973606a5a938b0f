"""The local engine: runs the compiled Argo manifest on this machine, each container's command as a subprocess.

manifest → workflow → execution (tasks that fit run, others wait) → run.json, logs/
"""
