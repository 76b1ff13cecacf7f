"""Runs at the start of every Python process while ``mutants.py reach`` measures.

A ``.pth`` file of the virtual environment executes this with ``WORK``, a folder. Modules in
``WORK/code`` are loaded with a call before each statement that a mutant changes; the call notes
which test was going on. With ``WORK/coverage.ini``, lines and branches are recorded as well.
"""

import builtins
import importlib.machinery
import importlib.util
import marshal
import mmap
import os
import sys

WORK = globals()["WORK"]  # from the .pth file


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module whose code was prepared."""

    def get_code(self, fullname):
        with open(f"{WORK}/code/{fullname}", "rb") as file:  # noqa: PTH123
            return marshal.load(file)


class Finder:
    """Finds the modules whose code was prepared."""

    def __init__(self, modules):
        self.modules = modules

    def find_spec(self, name, path=None, target=None):
        if name not in self.modules or path is None:
            return None
        file = os.path.join(path[0], name.rpartition(".")[2] + ".py")  # noqa: PTH118
        return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))


def _reached_by(current):
    seen = set()

    def reached(site):
        pair = (site, current[:8])
        if pair in seen:
            return
        seen.add(pair)
        line = f"{int(pair[1])} {site}\n".encode()
        try:
            # A file for each process: tests limit how large a file may become.
            file = os.open(f"{WORK}/reached/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line)
            os.close(file)
        except OSError:
            pass

    return reached


def _begin():
    with open(f"{WORK}/current", "rb") as file:  # noqa: PTH123
        current = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    builtins.__mutant_reached__ = _reached_by(current)
    sys.meta_path.insert(0, Finder(frozenset(os.listdir(f"{WORK}/code"))))  # noqa: PTH208
    if os.path.exists(f"{WORK}/coverage.ini"):  # noqa: PTH110
        import coverage

        os.environ["COVERAGE_PROCESS_START"] = f"{WORK}/coverage.ini"
        coverage.process_startup()
        del os.environ["COVERAGE_PROCESS_START"]


_begin()
