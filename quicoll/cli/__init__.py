"""The `quicoll` command. Nothing here is imported by the library."""
