"""Norms with an autograd node of their own, whose backward writes each gradient once."""
