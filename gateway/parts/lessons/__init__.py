"""Requests that a server refuses for their form are asked again in another, which is remembered."""
