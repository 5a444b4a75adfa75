"""What a user may write in a TOML file or on the command line, checked before anything starts.

`schema` is the only place with a key's type, bound, default and help. Processes read resolved files
(`<output_dir>/configs/*.toml`), made by [`primerl.config.process_files.resolve`][], in which every key stands; their
settings are names and types only (`primerl.process.setting_checks`), and tests hold both to the same set of keys.
"""
