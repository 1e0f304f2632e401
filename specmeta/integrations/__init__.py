"""specmeta inside other engines: one module for each."""
