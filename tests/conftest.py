"""For all tests."""

import functools

import httpcore2

# Reading the list of authorities takes a client 30 ms. Those of tests share what was read once.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
