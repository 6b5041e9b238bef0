"""Another process that holds reads back until it is told to let go; what it is told and answers is one protocol."""

import subprocess
import sys
import threading

import pytest


class Gate:
    """Drives such a process: it obeys its standard input, and says on its standard output what it did."""

    def start(self, arguments, ready, what):
        """Run Python with `arguments` until it says `ready`; skip the test, with the reason, where it cannot."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen([sys.executable, *arguments], **pipes)
        self.one_at_a_time = threading.Lock()  # a timer may let go while the test's end does
        if self.process.stdout.readline() != ready:
            pytest.skip(f"{what}: {self.process.communicate()[1].decode().strip()}")
        return self

    def say(self, word, answer):
        with self.one_at_a_time:
            if self.process.stdin.closed:
                return  # it has ended, and holds nothing
            self.process.stdin.write(word)
            self.process.stdin.flush()
            while (line := self.process.stdout.readline()) != answer:
                assert line, "the process that holds reads has ended"

    def hold(self):
        self.say(b"h", b"holding\n")

    def let_go(self):
        self.say(b"p", b"passing\n")

    def wait_for_one(self):
        assert self.process.stdout.readline() == b"held\n"

    def end(self):
        idle = self.one_at_a_time.acquire(timeout=20)
        try:
            if idle:
                self.process.communicate(timeout=20)
        finally:
            self.process.kill()
            self.process.wait()
            if idle:
                self.one_at_a_time.release()
