"""Holds the folder that goes on ``sys.path``; nothing is imported from here."""
