"""What a user may write in a TOML file or on the command line, checked before anything starts.

One definition of each knob. The processes read resolved files (`<output_dir>/configs/*.toml`), made by
[`primerl.config.process_files.resolve`][]; their own readers are strict too, and tests hold both to the same set of
keys.
"""
