"""What the processes agree on. Nothing here knows a server, a database or a clock of its own."""
