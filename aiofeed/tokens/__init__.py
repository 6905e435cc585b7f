"""``Tokens``: windows of tokens in files, mapped or at URLs."""
