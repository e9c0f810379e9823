"""The plan: what a run needs on its devices, found out before they are paid for. The command is `__main__.py`."""
