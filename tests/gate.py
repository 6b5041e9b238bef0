"""Another process that holds reads back until it is told to let go; what it is told and answers is one protocol."""

import subprocess
import sys

import pytest


class Gate:
    """Drives such a process: it obeys its standard input, and says on its standard output what it did."""

    def start(self, arguments, ready, what):
        """Run Python with `arguments` until it says `ready`; skip the test, with the reason, where it cannot."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen([sys.executable, *arguments], **pipes)
        if self.process.stdout.readline() != ready:
            pytest.skip(f"{what}: {self.process.communicate()[1].decode().strip()}")
        return self

    def say(self, word, answer):
        self.process.stdin.write(word)
        self.process.stdin.flush()
        while self.process.stdout.readline() != answer:
            pass

    def hold(self):
        self.say(b"h", b"holding\n")

    def let_go(self):
        self.say(b"p", b"passing\n")

    def wait_for_one(self):
        assert self.process.stdout.readline() == b"held\n"

    def end(self):
        self.process.communicate()
