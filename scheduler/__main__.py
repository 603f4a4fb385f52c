"""`python -m scheduler`: the scheduler process."""

from contracts.grpc_threads import use_few_threads

if __name__ == "__main__":
    use_few_threads()
    from scheduler.process import main  # here, since it imports gRPC

    main()
