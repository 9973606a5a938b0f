"""A folder as two hosts see it that cache names, attributes and absence, as an NFS client does.

python -m tests.campaign.hosts BACKING MOUNT SECONDS mounts one of them until it is unmounted.

Of what happens through another mount a host hears nothing: for so many seconds it knows names, what is not there,
attributes, and where links lead. As with Linux and NFS (version 3), an open asks for the attributes of the file itself,
and the open of a directory for what is in it; a file that is gone is ESTALE, for which Linux looks up the path once
more; locks are taken where the files are, at once, and an exclusive one needs a file that may be written to. Unlike
with NFS, what a host changes in a directory does not tell it of the others' changes there: it is late more often.

It speaks the protocol of linux/fuse.h itself: no maintained binding passes locks and identifies files by what they are,
not by their paths.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).parents[2]
FUSERMOUNT: Final = "fusermount3"
ROOT: Final = 1
THREADS: Final = 6
MAX_WRITE: Final = 1 << 17
POLL_S: Final = 0.01
MOUNTED_S: Final = 10

# linux/fuse.h
HEADER: Final = struct.Struct("=IIQQIIII")
ANSWER: Final = struct.Struct("=IiQ")
ATTRIBUTES: Final = struct.Struct("=6Q10I")
ENTRY: Final = struct.Struct("=QQQQII")
SETATTR: Final = struct.Struct("=IIQQQQQQIIIIIIII")
INIT: Final = struct.Struct("=IIIIHHIIHHI7I")
LOCK: Final = struct.Struct("=QQQQIIII")
READ_WRITE: Final = struct.Struct("=QQIIQII")
VERSION: Final = (7, 31)
ASYNC_READ, ATOMIC_TRUNCATE, BIG_WRITES, FLOCKS, AUTO_INVALIDATE, PARALLEL, CACHE_LINKS = (
    1 << bit for bit in (0, 3, 5, 10, 12, 18, 23)
)
FORGET, OPEN_DIRECTORY, SET_LOCK_WAIT, INTERRUPT, DESTROY, BATCH_FORGET = 2, 27, 33, 36, 38, 42
ATTRIBUTES_INVALID, NAME_INVALID = 2, 3
BY_FLOCK: Final = 1
DT_DIR, DT_REG, DT_LNK = 4, 8, 10  # dirent.h


class Node:
    """A file by its inode, which is kept from being given to another one."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.lookups = 0
        self.known_until_s = 0.0
        self.known = b""
        """Its attributes. The kernel asks for them again once anything was read of it."""
        self.removed_here = False
        self.names: dict[bytes, int] = {}
        """What was looked up in it: the number of its inode then, 0 for what was not there."""

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"

    def status(self) -> os.stat_result:
        """Ask for the attributes of a file that this host is about to open or to change."""
        self.known_until_s = 0.0
        return self.check()

    def check(self) -> os.stat_result:
        """Raise ESTALE if another host removed it."""
        status = os.fstat(self.descriptor)
        if not (status.st_nlink or self.removed_here):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return status


class Host:
    """Answers the kernel for one mount."""

    def __init__(self, backing: Path, device: int, seconds: float) -> None:
        self.device, self.seconds, self.valid = device, seconds, (int(seconds), int(seconds % 1 * 1e9))
        self.changing = threading.RLock()
        root = Node(os.open(backing, os.O_PATH))
        self.nodes = {ROOT: root}
        self.numbers = {self.identity(root.status()): ROOT}
        self.given = ROOT
        self.listed: dict[int, list[tuple[str, int, int]]] = {}
        self.interrupted: set[int] = set()
        self.operations: dict[int, Callable[[int, bytes, int], bytes]] = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 5: self.readlink, 6: self.symlink, 8: self.mknod,
            9: self.mkdir, 10: self.unlink, 11: self.rmdir, 12: self.rename, 13: self.link, 14: self.open,
            15: self.read, 16: self.write, 17: self.statfs, 18: self.release, 20: self.fsync, 25: self.nothing,
            26: self.init, OPEN_DIRECTORY: self.opendir, 28: self.readdir, 29: self.releasedir, 30: self.nothing,
            32: self.lock, SET_LOCK_WAIT: self.lock, 35: self.create, 45: self.rename2,
        }  # fmt: skip

    @staticmethod
    def identity(status: os.stat_result) -> tuple[int, int]:
        return status.st_dev, status.st_ino

    # Requests

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.device, MAX_WRITE + (1 << 16))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return  # unmounted
            _, operation, unique, node, *_ = HEADER.unpack_from(request)
            body = request[HEADER.size :]
            if operation in (SET_LOCK_WAIT, OPEN_DIRECTORY):  # which may wait for other requests
                threading.Thread(target=self.answer, args=(operation, unique, node, body), daemon=True).start()
            elif operation == FORGET:
                self.forget(node, *struct.unpack_from("=Q", body))
            elif operation == BATCH_FORGET:
                for number in range(struct.unpack_from("=I", body)[0]):
                    self.forget(*struct.unpack_from("=QQ", body, 8 + 16 * number))
            elif operation == INTERRUPT:
                self.interrupted.add(*struct.unpack_from("=Q", body))
            elif operation != DESTROY:
                self.answer(operation, unique, node, body)

    def answer(self, operation: int, unique: int, node: int, body: bytes) -> None:
        code, content = -errno.ENOSYS, b""
        if method := self.operations.get(operation):
            try:
                code, content = 0, method(node, body, unique)
            except OSError as error:
                code = -(error.errno or errno.EIO)
        with suppress(FileNotFoundError):  # whoever asked has been killed
            os.write(self.device, ANSWER.pack(ANSWER.size + len(content), code, unique) + content)

    def init(self, node: int, body: bytes, unique: int) -> bytes:
        flags = ASYNC_READ | ATOMIC_TRUNCATE | BIG_WRITES | FLOCKS | AUTO_INVALIDATE | PARALLEL | CACHE_LINKS
        return INIT.pack(*VERSION, 1 << 17, flags, 16, 12, MAX_WRITE, 1, 0, 0, 0, *[0] * 7)

    def nothing(self, node: int, body: bytes, unique: int) -> bytes:
        return b""

    # Names

    def entry(self, parent: int, name: bytes) -> bytes:
        """Look a name up: it, or that it is not there, is known for a while."""
        directory = self.nodes[parent]
        directory.check()
        try:
            descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=directory.descriptor)
        except FileNotFoundError:
            directory.names[name] = 0
            return ENTRY.pack(0, 0, self.valid[0], 0, self.valid[1], 0) + bytes(ATTRIBUTES.size)
        with self.changing:
            status = os.fstat(descriptor)
            if number := self.numbers.get(self.identity(status)):
                os.close(descriptor)
            else:
                self.given = number = self.given + 1
                self.nodes[number] = Node(descriptor)
                self.numbers[self.identity(status)] = number
            node = self.nodes[number]
            node.lookups += 1
            node.known, node.known_until_s = attributes(status), time.monotonic() + self.seconds
            directory.names[name] = status.st_ino
        seconds, nanoseconds = self.valid
        return ENTRY.pack(number, 0, seconds, seconds, nanoseconds, nanoseconds) + attributes(status)

    def forget(self, number: int, count: int) -> None:
        with self.changing:
            node = self.nodes[number]
            node.lookups -= count
            if number != ROOT and not node.lookups:
                del self.nodes[number], self.numbers[self.identity(os.fstat(node.descriptor))]
                os.close(node.descriptor)

    def lookup(self, node: int, body: bytes, unique: int) -> bytes:
        return self.entry(node, body.rstrip(b"\0"))

    def directory(self, number: int) -> int:
        self.nodes[number].status()
        return self.nodes[number].descriptor

    def mknod(self, node: int, body: bytes, unique: int) -> bytes:
        mode, device = struct.unpack_from("=II", body)
        os.mknod(name := body[16:].rstrip(b"\0"), mode, device, dir_fd=self.directory(node))
        return self.entry(node, name)

    def mkdir(self, node: int, body: bytes, unique: int) -> bytes:
        os.mkdir(name := body[8:].rstrip(b"\0"), *struct.unpack_from("=I", body), dir_fd=self.directory(node))
        return self.entry(node, name)

    def symlink(self, node: int, body: bytes, unique: int) -> bytes:
        name, target = body.rstrip(b"\0").split(b"\0")
        os.symlink(target, name, dir_fd=self.directory(node))
        return self.entry(node, name)

    def link(self, node: int, body: bytes, unique: int) -> bytes:
        source = self.nodes[struct.unpack_from("=Q", body)[0]]
        source.status()
        os.link(source.path, name := body[8:].rstrip(b"\0"), dst_dir_fd=self.directory(node))
        return self.entry(node, name)

    def removing(self, parent: int, name: bytes) -> None:
        """Note that this host itself removes a file, which it may still have open."""
        with suppress(FileNotFoundError), self.changing:
            status = os.stat(name, dir_fd=self.directory(parent), follow_symlinks=False)
            if (number := self.numbers.get(self.identity(status))) and status.st_nlink == 1:
                self.nodes[number].removed_here = True

    def unlink(self, node: int, body: bytes, unique: int) -> bytes:
        self.removing(node, name := body.rstrip(b"\0"))
        os.unlink(name, dir_fd=self.directory(node))
        return b""

    def rmdir(self, node: int, body: bytes, unique: int) -> bytes:
        os.rmdir(body.rstrip(b"\0"), dir_fd=self.directory(node))
        return b""

    def rename(self, node: int, body: bytes, unique: int, start: int = 8) -> bytes:
        to, *_ = struct.unpack_from("=Q", body)
        source, target = body[start:].rstrip(b"\0").split(b"\0")
        self.removing(to, target)
        os.rename(source, target, src_dir_fd=self.directory(node), dst_dir_fd=self.directory(to))
        return b""

    def rename2(self, node: int, body: bytes, unique: int) -> bytes:
        if struct.unpack_from("=QI", body)[1]:
            raise OSError(errno.EINVAL, "flags")
        return self.rename(node, body, unique, start=16)

    def readlink(self, node: int, body: bytes, unique: int) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self.nodes[node].descriptor))

    # Attributes

    def getattr(self, node: int, body: bytes, unique: int) -> bytes:
        file, now_s = self.nodes[node], time.monotonic()
        if now_s >= file.known_until_s:
            file.known = attributes(file.status())
            file.known_until_s = now_s + self.seconds
        left_s = file.known_until_s - now_s
        return struct.pack("=QII", int(left_s), int(left_s % 1 * 1e9), 0) + file.known

    def setattr(self, node: int, body: bytes, unique: int) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = SETATTR.unpack_from(body)
        (file := self.nodes[node]).status()
        if valid & 1:
            Path(file.path).chmod(stat.S_IMODE(mode))
        if valid & 6:
            os.chown(file.path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(file.path, size)
        if valid & (16 | 32 | 128 | 256):
            now, status = time.time_ns(), file.status()
            new = (
                now if valid & 128 else atime * 10**9 + atime_ns if valid & 16 else status.st_atime_ns,
                now if valid & 256 else mtime * 10**9 + mtime_ns if valid & 32 else status.st_mtime_ns,
            )
            link = str(Path(file.path).readlink()) if stat.S_ISLNK(status.st_mode) else ""
            os.utime(link or file.path, ns=new, follow_symlinks=not link)
        return self.getattr(node, body, unique)

    def statfs(self, node: int, body: bytes, unique: int) -> bytes:
        of = os.fstatvfs(self.nodes[ROOT].descriptor)
        counts = (of.f_blocks, of.f_bfree, of.f_bavail, of.f_files, of.f_ffree)
        return struct.pack("=5Q4I24x", *counts, of.f_bsize, of.f_namemax, of.f_frsize, 0)

    # Files

    def forgotten(self, kind: int, notice: bytes) -> None:
        """Let the kernel forget something that it knows."""
        with suppress(FileNotFoundError):
            os.write(self.device, ANSWER.pack(ANSWER.size + len(notice), kind, 0) + notice)

    def opened(self, node: int, descriptor: int) -> bytes:
        """Close-to-open: what is known of attributes is asked for again once the file, or directory, is open."""
        self.forgotten(ATTRIBUTES_INVALID, struct.pack("=Qqq", node, -1, 0))
        return struct.pack("=QIi", descriptor, 0, 0)

    def open(self, node: int, body: bytes, unique: int) -> bytes:
        flags = struct.unpack_from("=I", body)[0] & ~(os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL)
        self.nodes[node].status()
        return self.opened(node, os.open(self.nodes[node].path, flags))

    def create(self, node: int, body: bytes, unique: int) -> bytes:
        flags, mode = struct.unpack_from("=II", body)
        name = body[16:].rstrip(b"\0")
        flags = (flags & ~os.O_APPEND) | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(name, flags, stat.S_IMODE(mode), dir_fd=self.directory(node))
        entry = self.entry(node, name)
        (number,) = struct.unpack_from("=Q", entry)
        return entry + self.opened(number, descriptor)

    def read(self, node: int, body: bytes, unique: int) -> bytes:
        descriptor, offset, size, *_ = READ_WRITE.unpack_from(body)
        self.nodes[node].check()
        return os.pread(descriptor, size, offset)

    def write(self, node: int, body: bytes, unique: int) -> bytes:
        descriptor, offset, size, *_ = READ_WRITE.unpack_from(body)
        self.nodes[node].status()
        return struct.pack("=II", os.pwrite(descriptor, body[40 : 40 + size], offset), 0)

    def fsync(self, node: int, body: bytes, unique: int) -> bytes:
        os.fsync(*struct.unpack_from("=Q", body))
        return b""

    def release(self, node: int, body: bytes, unique: int) -> bytes:
        os.close(*struct.unpack_from("=Q", body))
        return b""

    def opendir(self, node: int, body: bytes, unique: int) -> bytes:
        """The same for a directory, of which the names that mean something else now are looked up again."""
        directory = self.nodes[node]
        directory.status()
        listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory.descriptor)
        with os.scandir(listing) as found:
            self.listed[listing] = [(each.name, each.inode(), kind(each)) for each in found]
        inodes = {os.fsencode(name): inode for name, inode, _ in self.listed[listing]}
        for name in [name for name, inode in [*directory.names.items()] if inode != inodes.get(name, 0)]:
            self.forgotten(NAME_INVALID, struct.pack("=QII", node, len(name), 0) + name + b"\0")
        return self.opened(node, listing)

    def readdir(self, node: int, body: bytes, unique: int) -> bytes:
        descriptor, offset, size, *_ = READ_WRITE.unpack_from(body)
        content = b""
        for number, (name, inode, of) in enumerate(self.listed[descriptor][offset:], offset + 1):
            text = os.fsencode(name)
            row = struct.pack("=QQII", inode, number, len(text), of) + text
            row += bytes(-len(row) % 8)
            if len(content) + len(row) > size:
                break
            content += row
        return content

    def releasedir(self, node: int, body: bytes, unique: int) -> bytes:
        (descriptor,) = struct.unpack_from("=Q", body)
        del self.listed[descriptor]
        os.close(descriptor)
        return b""

    def lock(self, node: int, body: bytes, unique: int) -> bytes:
        """Take or release a lock where the file is; one that is waited for is tried again and again."""
        descriptor, _, _, _, how, _, flags, _ = LOCK.unpack_from(body)
        if not flags & BY_FLOCK:
            raise OSError(errno.ENOSYS, "only flock")
        needed = {fcntl.F_WRLCK: os.O_RDONLY, fcntl.F_RDLCK: os.O_WRONLY}.get(how)
        if needed == fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        operation = {fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_RDLCK: fcntl.LOCK_SH}.get(how, fcntl.LOCK_UN)
        waits = threading.current_thread() not in self.threads
        while True:
            try:
                fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
                return b""
            except BlockingIOError:
                if not waits:
                    raise
            if unique in self.interrupted:  # whoever waits gets a signal
                self.interrupted.discard(unique)
                raise OSError(errno.EINTR, os.strerror(errno.EINTR))
            time.sleep(POLL_S)

    def run(self) -> None:
        self.threads = [threading.Thread(target=self.serve) for _ in range(THREADS)]
        for each in self.threads:
            each.start()
        for each in self.threads:
            each.join()


def attributes(status: os.stat_result) -> bytes:
    times = [divmod(each, 10**9) for each in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
    return ATTRIBUTES.pack(
        *(status.st_ino, status.st_size, status.st_blocks),
        *(seconds for seconds, _ in times),
        *(nanoseconds for _, nanoseconds in times),
        *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, status.st_rdev, status.st_blksize, 0),
    )


def kind(entry: os.DirEntry[Any]) -> int:
    """The type of a name in a listing, as the listing itself has it: the file may be gone."""
    return DT_LNK if entry.is_symlink() else DT_DIR if entry.is_dir(follow_symlinks=False) else DT_REG


def why_not() -> str:
    """Say why nothing can be mounted here; empty if something can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs FUSE: no /dev/fuse that may be used"
    return "" if shutil.which(FUSERMOUNT) else f"needs FUSE: no {FUSERMOUNT}, which the package fuse3 has"


def unmount(mount: Path) -> None:
    subprocess.run([FUSERMOUNT, "-u", "-z", mount], check=False)


@contextmanager
def mounted_twice(backing: Path, seconds: float) -> Iterator[tuple[Path, Path]]:
    """Mount a folder twice, beside it, each time with caches of its own that last so many seconds."""
    backing.mkdir(parents=True)
    mounts = backing.with_name(f"{backing.name}-a"), backing.with_name(f"{backing.name}-b")
    with ExitStack() as stack:
        for mount in mounts:
            mount.mkdir()
            command = [sys.executable, "-m", "tests.campaign.hosts", str(backing), str(mount), str(seconds)]
            process = stack.enter_context(subprocess.Popen(command, cwd=REPOSITORY))
            stack.callback(unmount, mount)
            until_s = time.monotonic() + MOUNTED_S
            while not mount.is_mount():
                assert process.poll() is None, "it could not be mounted"
                assert time.monotonic() < until_s, "it was not mounted"
                time.sleep(0.02)
        yield mounts


def main() -> None:
    backing, mount, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    ours, theirs = socket.socketpair()
    options = f"fsname=hosts,subtype=hosts,default_permissions{',allow_other' if os.getuid() == 0 else ''}"
    command = [FUSERMOUNT, "-o", options, "--", mount]
    subprocess.run(
        command, env=os.environ | {"_FUSE_COMMFD": str(theirs.fileno())}, pass_fds=[theirs.fileno()], check=True
    )
    _, (device, *_), _, _ = socket.recv_fds(ours, 1, 1)
    os.umask(0)  # the kernel has applied the caller's
    Host(backing, device, seconds).run()


if __name__ == "__main__":
    main()
