"""A second adapter of the policy: discrete events on a virtual clock instead of workers and Redis."""
