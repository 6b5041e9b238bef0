"""Moves bytes: arena, slots, leases, policies, queues, system calls.

Knows no tensor, model or file format. Private: the public interface is the package ``fastcache``.
"""
