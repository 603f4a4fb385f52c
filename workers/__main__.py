"""`python -m workers`: one worker process."""

from contracts.grpc_threads import use_few_threads

if __name__ == "__main__":
    use_few_threads()
    # Imported here because the engine's child processes import this file again, and because it imports gRPC.
    from workers.process import main

    main()
