"""How a command ends where argparse would exit. Imports nothing, since every command imports it."""


class CommandEnd(SystemExit):
    """The parser has answered the command itself, by help or a complaint; `code` is the exit code."""
