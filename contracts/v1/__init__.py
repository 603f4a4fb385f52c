"""Generated protobuf code; `make proto` rebuilds it from the .proto files beside it."""
