"""`python -m workers`: one worker process."""

if __name__ == "__main__":
    # Imported here because the engine's child processes import this file again.
    from workers.process import main

    main()
