"""Leave three orphans that end at once; say when no zombie is left of them, or which ones are after 20 seconds."""
import os
import time


def leave_orphan():
    """Fork twice; return the PID of the grandchild, which ends when its parent has been reaped."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        grandchild = os.fork()
        if grandchild:
            os._exit(0 if os.write(answer, b"%d\n" % grandchild) else 1)
        os.read(reader, 1)  # until the writer is closed
        os._exit(0)
    os.close(reader)
    os.waitpid(child, 0)
    os.close(writer)
    return int(os.read(answers, 20))


answers, answer = os.pipe()
orphans = [leave_orphan() for _ in range(3)]
deadline = time.monotonic() + 20
while any(os.path.exists("/proc/%d" % pid) for pid in orphans) and time.monotonic() < deadline:
    time.sleep(0.002)
left = [pid for pid in orphans if os.path.exists("/proc/%d" % pid)]
print("left 3 orphans, " + ("zombies: %s" % left if left else "all reaped"))
