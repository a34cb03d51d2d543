"""Tests of the HTTP interfaces, over real sockets and fake models."""
