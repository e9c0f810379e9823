"""The rehearsal: the whole life of a config at a small size, before devices are paid for. The command is `__main__.py`."""
