"""Packs the Python that runs it, and sandboxd, into a folder that works in an image without either: `pack(FOLDER)`.

Run in a process of its own, with `-I -S`: by a controller for the machine's Docker Engine, and by the init container of
a pod. What sandboxd needs is found by importing all of it: those modules, and what the dynamic loader then has open.
Invariant: what is started by `command` loads no library and no module but the folder's, whatever the image has, and no
program that it starts can tell, since nothing of it is in the environment. Standard library only, Python 3.7+.
"""

from __future__ import annotations

import ctypes
import importlib
import marshal
import os
import shutil
import sys
from importlib.util import MAGIC_NUMBER
from typing import Any

from sandbox.runtime.hardening import LATER

ENTRIES = ("sandbox.runtime.handoff", "sandbox.runtime.pod", "sandbox.runtime.carry")
UNWANTED = ("_hashlib", "_ssl", "grp", "pwd")
"""OpenSSL costs memory and has a configuration that names libraries, and so have accounts; all do without."""
ELSEWHERE = {b"/etc/ld.so.": b"/proc/none.", b"/usr/lib/": b"/proc/no/", b"/usr/lib64/": b"/proc/none/"}
"""Where the loader and libc look for lists of libraries, for locales and converters; and where nobody can put any."""
LOADER, LIBRARIES, PYTHON = "lib/ld.so", "lib", "bin/python"
SEALED = "lib/ld-sealed.so"
"""The loader once more, as a file that nobody may read: so the kernel lets nobody trace what is started by it, from its
first instruction on, who is not privileged. Much of its own /proc belongs to root then."""
PLACE = "/.agentrl"
"""Where containers see it: a task that may write the root cannot move what is mounted, but could any folder above that,
and have its own files executed and imported instead."""
UNCHECKED = b"\x01\x00\x00\x00" + bytes(8)
"""What a compiled file says of its source: that nobody compares the two."""


def command(folder: str, code: str, *, sealed: bool = False) -> list[str]:
    """The words that run `code` in the Python of `folder`, with no settings but its own."""
    loader, libraries, python = (f"{folder}/{name}" for name in (SEALED if sealed else LOADER, LIBRARIES, PYTHON))
    return [loader, "--library-path", libraries, python, "-I", "-S", "-B", "-X", "utf8", "-c", code]


def pack(folder: str) -> None:
    """Into an empty folder, or one that is made. OSError when this Python cannot be moved."""
    os.umask(0o022)
    missing: dict[str, Any] = dict.fromkeys(UNWANTED)
    sys.modules.update(missing)
    for name in ENTRIES:
        importlib.import_module(name)
    for name in LATER:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # an interpreter may come without some of them
    home = os.path.join(folder, "lib", "python{}.{}".format(*sys.version_info[:2]))
    os.makedirs(os.path.join(home, "lib-dynload"))
    os.makedirs(os.path.join(folder, "bin"))
    extensions = set()
    for name, module in list(sys.modules.items()):
        path, parent = getattr(module, "__file__", None), name.rpartition(".")[0]
        # What only looks like a part, as os.path, is there by its own name as well.
        if not path or name == "__main__" or (parent and not hasattr(sys.modules[parent], "__path__")):
            continue
        if path.endswith(".py"):
            _compile(path, home, name, package=hasattr(module, "__path__"))
        else:
            extensions.add(path)
            shutil.copy(path, os.path.join(home, "lib-dynload", os.path.basename(path)))
    shutil.copyfile("/proc/self/exe", os.path.join(folder, PYTHON))
    os.chmod(os.path.join(folder, PYTHON), 0o755)
    _copy_libraries(folder, extensions)


def _compile(path: str, home: str, name: str, *, package: bool) -> None:
    """A module without its source, its documentation and its asserts, which costs least memory."""
    with open(path, "rb") as file:
        code = compile(file.read(), name, "exec", dont_inherit=True, optimize=2)
    target = os.path.join(home, *name.split("."), "__init__") if package else os.path.join(home, *name.split("."))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(f"{target}.pyc", "wb") as file:
        file.write(MAGIC_NUMBER + UNCHECKED + marshal.dumps(code))


def _copy_libraries(folder: str, extensions: set[str]) -> None:
    loader = ""
    for path in _loaded():
        name = os.path.basename(path)
        if name.startswith("ld"):
            loader = path
        elif name.startswith("libc."):
            _copy_deaf(path, os.path.join(folder, LIBRARIES, name))
        elif path not in extensions:
            shutil.copy(path, os.path.join(folder, LIBRARIES, name))
    if not loader:
        raise OSError(f"{os.readlink('/proc/self/exe')} has no dynamic loader, so its libraries cannot be carried")
    _copy_deaf(loader, os.path.join(folder, LOADER))
    shutil.copyfile(os.path.join(folder, LOADER), os.path.join(folder, SEALED))
    os.chmod(os.path.join(folder, SEALED), 0o111)


def _copy_deaf(source: str, target: str) -> None:
    """A program or library that asks nothing of the place where it runs."""
    with open(source, "rb") as file:
        data = file.read()
    for there, nowhere in ELSEWHERE.items():
        data = data.replace(there, nowhere)
    with open(target, "wb") as file:
        file.write(data)
    os.chmod(target, 0o755)


class _Object(ctypes.Structure):
    """The beginning of `struct dl_phdr_info`."""

    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def _loaded() -> list[str]:
    """Paths of the objects in this process, by the names under which they are looked for."""
    found = []

    def seen(info: Any, size: int, data: Any) -> int:
        path = os.fsdecode(info.contents.name or b"")
        if os.path.isabs(path):
            found.append(path)
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Object), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(kind(seen), None)
    return found
